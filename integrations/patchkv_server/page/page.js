"use strict";
// Asks for the state once a second and shows it. All texts come from clients of the server and go
// into the page as text only. Elements are kept from one state to the next, so that the keyboard's
// focus and the places of scrolled lists stay.

const POLL_MS = 1000, RETRY_MS = 3000;
const id = (name) => document.getElementById(name);
const number = new Intl.NumberFormat("en");
let key = null; // never stored anywhere else
let selected = null, timer = null, shown = { kinds: [], threads: [] };
const rows = new Map(); // number of a thread -> its element in the list
const cards = new Map(); // number of an answer of the selected thread -> its element
let cardsOf = null;

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function duration(ms) {
  const size = Math.abs(ms), sign = ms < 0 ? "−" : "";
  if (size < 1000) return `${sign}${Math.round(size)} ms`;
  if (size < 100e3) return `${sign}${(size / 1e3).toFixed(1)} s`;
  if (size < 100 * 60e3) return `${sign}${Math.round(size / 60e3)} min`;
  return `${sign}${(size / 3600e3).toFixed(1)} h`;
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; count >= 999.5 && unit < units.length - 1; unit++) count /= 1000;
  return `${unit && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

const total = (tokens) => Object.values(tokens).reduce((sum, count) => sum + count, 0);
const plural = (count, what) => `${number.format(count)} ${what}${count === 1 ? "" : "s"}`;
const words = (name) => name.replaceAll("_", " ");
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();

function described(tokens) {
  return shown.kinds.filter((kind) => tokens[kind])
    .map((kind) => `${number.format(tokens[kind])} ${kind}`).join(", ") || "none yet";
}

// Runs of [index of the kind, tokens]; `widest` tokens fill the whole width.
function strip(runs, tokens, widest) {
  const bar = make("div", "strip");
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", described(tokens));
  for (const [kind, count] of runs) {
    const run = make("i", shown.kinds[kind]);
    run.style.flexGrow = count;
    run.title = `${shown.kinds[kind]}: ${plural(count, "token")}`;
    bar.append(run);
  }
  if (widest) bar.style.width = `${Math.max(2, 100 * total(tokens) / widest)}%`;
  return bar;
}

const summed = (tokens) => shown.kinds.map((kind, i) => [i, tokens[kind]]).filter((run) => run[1]);

function showFigures(state) {
  const { totals, queue, memory } = state;
  put(id("model"), `${state.model} · policy ${state.policy}`);
  put(id("answers"), number.format(totals.answers));
  put(id("saved"), totals.ms_per_row === null ? "–" : `≈ ${duration(totals.saved_ms)}`);
  put(id("saved-note"), totals.ms_per_row === null ? "no rate measured yet"
    : `against an exact prefix cache: ${plural(totals.saved_rows, "row")} restored and not run, at the `
      + `${totals.ms_per_row.toPrecision(2)} ms a row that rows take here, less restoring and planning`);
  put(id("queue"), number.format(queue.waiting));
  put(id("queue-note"), `waiting, ${queue.running} running`);
  put(id("live"), bytes(memory.live_bytes));
  put(id("suspended"), bytes(memory.suspended_bytes));
  put(id("store"), memory.store_bytes === null ? "no store" : bytes(memory.store_bytes));
  id("all-strip").replaceChildren(strip(summed(totals.tokens), totals.tokens));
  put(id("all-title"), `All prompt tokens: ${described(totals.tokens)}`);
}

function threadRow(thread) {
  const item = make("li"), button = make("button");
  button.type = "button";
  button.addEventListener("click", () => {
    selected = thread.number;
    showThreads();
    poll();
    id("detail").focus({ preventScroll: matchMedia("(min-width: 801px)").matches });
  });
  item.append(button);
  return item;
}

function fillRow(item, thread, tenants) {
  const version = JSON.stringify([thread, tenants]);
  if (item.dataset.version === version) return;
  item.dataset.version = version;
  const top = make("div", "row"), bottom = make("div", "row note");
  top.append(make("span", "name", thread.name), make("span", "note", thread.place || "no state"));
  const cause = thread.cause ? words(thread.cause) : plural(thread.answers, "answer");
  bottom.append(make("span", "", tenants > 1 ? `${thread.tenant} · ${cause}` : cause),
    make("span", "", `${plural(total(thread.tokens), "token")}`));
  item.firstChild.title = thread.name;
  item.firstChild.replaceChildren(top, strip(summed(thread.tokens), thread.tokens), bottom);
}

function showThreads() {
  const wanted = id("filter").value.trim().toLowerCase(), list = id("threads");
  const tenants = new Set(shown.threads.map((thread) => thread.tenant)).size;
  const found = shown.threads.filter((thread) => thread.name.toLowerCase().includes(wanted));
  const numbers = new Set(found.map((thread) => thread.number));
  for (const [number, item] of rows) {
    if (!numbers.has(number)) { item.remove(); rows.delete(number); }
  }
  found.forEach((thread, place) => {
    if (!rows.has(thread.number)) rows.set(thread.number, threadRow(thread));
    const item = rows.get(thread.number);
    fillRow(item, thread, tenants);
    item.firstChild.setAttribute("aria-current", String(thread.number === selected));
    // Moving an element takes the focus from it: the one that has it stays where it is.
    if (list.children[place] !== item && !item.contains(document.activeElement)) {
      list.insertBefore(item, list.children[place] || null);
    }
  });
  put(id("threads-title"), `Threads: ${number.format(shown.threads.length)}`);
  id("no-threads").hidden = shown.threads.length > 0;
  id("filter").hidden = shown.threads.length < 2;
}

const listed = (places, count) => `message${count > 1 ? "s" : ""} ${places.join(", ")}`
  + (count > places.length ? " and others" : "");

function whereabouts(edit) {
  if (edit.scope !== "messages") return words(edit.scope);
  if (!edit.old_indices.length && !edit.new_indices.length) return "nothing answers to it";
  if (!edit.old_indices.length) return `new ${listed(edit.new_indices, edit.messages)}`;
  if (!edit.new_indices.length) return `old ${listed(edit.old_indices, edit.messages)}`;
  const now = edit.new_indices.join(", "), was = listed(edit.old_indices, edit.messages);
  return edit.old_indices.join(", ") === now ? was : `${was}, now ${now}`;
}

function editLine(edit) {
  const marks = [edit.declared ? "declared" : "found", edit.partial && "a part of it",
    edit.forget && "to be forgotten"].filter(Boolean).join(", ");
  const by = edit.author ? ` by ${edit.author}` : "";
  return make("li", "", `${words(edit.kind)}${by}: ${whereabouts(edit)} (${marks})`);
}

function missBox(miss) {
  const box = make("div", "miss");
  box.append(make("h4", "", `Why it missed: ${miss.summary}`));
  const at = miss.message === null ? "behind all messages"
    : `message ${miss.message} (${miss.role}${miss.field ? `, ${miss.field}` : ""})`;
  box.append(make("p", "", `Cause ${miss.cause}, at ${at}. The first ${plural(miss.prefix, "token")} are `
    + `as before; an exact prefix cache computes the other ${number.format(miss.lost)}.`));
  if (miss.later.length) {
    box.append(make("p", "", `Further on: ${miss.later.map(words).join(", ")}.`));
  }
  box.append(make("p", "", miss.remedy));
  if (miss.excerpts) {
    const { detail, before, old, new: now } = miss.excerpts;
    const text = make("pre", "", `… ${before}`);
    text.append(make("del", "", old), make("ins", "", now));
    box.append(make("p", "", detail), text);
  }
  return box;
}

function card(answer, widest) {
  const item = make("li"), top = make("div", "row"), tokens = total(answer.tokens);
  const saved = answer.saved_rows === 0 ? ""
    : answer.saved_ms === null ? `, saved ${plural(answer.saved_rows, "row")}`
      : `, saved ≈ ${duration(answer.saved_ms)} (estimated)`;
  top.append(
    make("h3", "", `Version ${answer.number}: ${plural(tokens, "token")}`),
    make("span", "note", `${clock(answer.ended_s)} · ${answer.policy}`
      + (answer.fallback ? ", fell back" : "") + (answer.is_exact ? " · exact" : " · approximate")),
  );
  item.append(top, strip(answer.strip, answer.tokens, widest));
  const counts = make("ul", "counts");
  for (const kind of shown.kinds.filter((kind) => answer.tokens[kind])) {
    const count = make("li", "", `${number.format(answer.tokens[kind])} ${kind}`);
    count.prepend(make("i", kind));
    counts.append(count);
  }
  item.append(counts, make("p", "note", `First token after ${duration(answer.resume_ttft_ms)} of `
    + `recovery and ${duration(answer.planning_ms)} of planning${saved}; `
    + (answer.complete ? `${plural(answer.output_tokens, "token")} in ${duration(answer.took_ms)}`
      : "the answer was not completed")
    + (answer.restored_bytes ? `; ${bytes(answer.restored_bytes)} read` : "") + "."));
  if (answer.edits.length) {
    const list = make("ul", "edits");
    list.append(...answer.edits.map(editLine));
    if (answer.edits_left_out) list.append(make("li", "", `and ${answer.edits_left_out} more`));
    item.append(list);
  }
  if (answer.miss) item.append(missBox(answer.miss));
  return item;
}

function showDetail(thread) {
  id("detail").hidden = thread === null;
  if (thread === null) return;
  if (cardsOf !== thread.number) { cards.clear(); cardsOf = thread.number; }
  put(id("detail-title"), `Versions of ${thread.name}`);
  const all = thread.answers.length ? thread.answers[0].number : 0;
  put(id("detail-note"), all > thread.answers.length
    ? `The newest ${thread.answers.length} of ${number.format(all)}, newest first.` : "Newest first.");
  const widest = Math.max(1, ...thread.answers.map((answer) => total(answer.tokens)));
  const elements = thread.answers.map((answer) => {
    const version = `${answer.miss !== null} ${widest}`, old = cards.get(answer.number);
    if (old && old.dataset.version === version) return old;
    const element = card(answer, widest);
    element.dataset.version = version;
    cards.set(answer.number, element);
    return element;
  });
  const list = id("versions");
  if (elements.length !== list.children.length || elements.some((e, i) => e !== list.children[i])) {
    list.replaceChildren(...elements);
  }
}

function say(text, lost) {
  put(id("connection"), text);
  id("connection").classList.toggle("lost", lost);
}

async function poll() {
  clearTimeout(timer);
  let wait = POLL_MS;
  try {
    const query = selected === null ? "" : `?thread=${selected}`;
    const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
    const response = await fetch(`patchkv/state${query}`, { headers, cache: "no-store" });
    if (response.status === 401) return askForKey();
    if (response.status === 403) throw new Error("open this page as http://localhost, or start the server with API keys");
    if (!response.ok) throw new Error(`the server answered with status ${response.status}`);
    const state = await response.json();
    shown = state;
    if (!state.threads.some((thread) => thread.number === selected)) {
      const first = state.threads.length ? state.threads[0].number : null;
      if (first !== null) wait = 0; // and now its answers
      selected = first;
    }
    id("content").hidden = false;
    id("key-form").hidden = true;
    showFigures(state);
    showThreads();
    if (state.selected === null || state.selected.number === selected) showDetail(state.selected);
    say("live", false);
  } catch (error) {
    say(error instanceof TypeError ? "no connection, trying again" : error.message, true);
    wait = RETRY_MS;
  }
  clearTimeout(timer); // another poll may have begun meanwhile
  if (!document.hidden) timer = setTimeout(poll, wait);
}

function askForKey() {
  say(key === null ? "a key is needed" : "this key is not known", key !== null);
  key = null;
  id("content").hidden = true;
  id("key-form").hidden = false;
  id("key").focus();
}

id("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = id("key").value;
  id("key").value = "";
  poll();
});
id("threads").addEventListener("keydown", (event) => {
  const item = event.target.closest("li");
  const next = { ArrowDown: item.nextSibling, ArrowUp: item.previousSibling }[event.key];
  if (next) { event.preventDefault(); next.firstChild.focus(); }
});
id("filter").addEventListener("input", showThreads);
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
poll();
