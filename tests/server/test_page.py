"""The page: what it is served with, and what a browser shows of it."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest
import uvicorn

from patchkv_agents.context import ThreadKey
from patchkv_agents.recovery import RecoveryPolicy
from patchkv_server.app import create_app
from patchkv_server.auth import ApiKeys

from ..engine.models import tiny_engine
from .browser import CHROMIUM, Browser
from .scripted import SECRET, Scripted, conversation

MARKUP = "<img src=x onerror=alert(1)><b>bold</b>"


@pytest.fixture(scope="module")
def engine(smollm2_tokenizer):
    return tiny_engine(smollm2_tokenizer, max_tokens=4096)


def get(app, path, **headers):
    async def ask():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


def test_files_and_their_headers(engine):
    served = Scripted(engine, keys=True)
    for path, kind in {
        "/": "text/html",
        "/page.js": "text/javascript",
        "/page.css": "text/css",
        "/icon.svg": "image/svg+xml",
    }.items():
        answer = get(served.app, path)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert answer.headers["x-content-type-options"] == "nosniff"
        without_name_of_namespace = answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in without_name_of_namespace.replace("http://localhost", "")
        assert "https://" not in answer.text  # nothing comes from elsewhere
    served.activity.close()


def test_state_and_metrics_need_the_key(engine):
    served = Scripted(engine, keys=True)
    served.ask(conversation(), "of a", tenant="a")
    served.ask(conversation(), "of b", tenant="b")
    for path in ("/patchkv/state", "/metrics"):
        assert get(served.app, path).status_code == 401
        assert get(served.app, path, authorization="Bearer nonsense").status_code == 401
    answer = get(served.app, "/patchkv/state?thread=1", authorization="Bearer key-b")
    assert answer.headers["cache-control"] == "no-store"
    state = answer.json()
    assert [thread["name"] for thread in state["threads"]] == ["of b"] and not state["selected"]
    assert get(served.app, "/patchkv/state?thread=x", authorization="Bearer key-b").is_client_error
    answer = get(served.app, "/metrics", authorization="Bearer key-a")
    assert answer.headers["content-type"] == served.metrics.total.content_type
    assert b"patchkv_prompt_tokens_total" in answer.content
    served.activity.close()


def test_state_of_the_whole_server(smollm2_tokenizer):
    """Two requests to the API, the second with another tool result, and what the page is told."""
    engine = tiny_engine(smollm2_tokenizer, max_tokens=4096)
    engine.policy = RecoveryPolicy.default()
    app = create_app(engine, keys=ApiKeys(["me:my-own-key", "you:your-own-key"]))
    mine = {"Authorization": "Bearer my-own-key"}

    async def converse():
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
        ):
            for messages in (conversation(), conversation(train="is cancelled")):
                body = {"model": engine.model_name, "messages": messages, "max_tokens": 2}
                answer = await client.post("/v1/chat/completions", json=body, headers=mine)
                assert answer.status_code == 200, answer.text
            yours = {"Authorization": "Bearer your-own-key"}
            assert (await client.get("/patchkv/state")).status_code == 401
            others = (await client.get("/patchkv/state", headers=yours)).json()
            address = "/patchkv/state?thread=1"
            while (state := (await client.get(address, headers=mine)).json())["threads"]:
                if state["threads"][0]["cause"] is not None:
                    break
            return state, others, (await client.get("/metrics", headers=mine)).text

    state, others, metrics = asyncio.run(asyncio.wait_for(converse(), 30))
    (thread,) = state["threads"]
    assert thread["tenant"] == "me" and thread["place"] == "live" and thread["answers"] == 2
    assert thread["cause"] == "result_replaced"
    (edit,) = state["selected"]["answers"][0]["edits"]
    assert edit["kind"] == "replace_tool_result" and edit["new_indices"] == [1]
    assert state["memory"]["live_bytes"] > 0 and state["totals"]["tokens"]["restored"] > 0
    assert others["threads"] == [] and others["totals"]["answers"] == 0
    assert 'patchkv_requests_total{status="200"} 2.0' in metrics
    assert "patchkv_queue_wait_seconds_count 2.0" in metrics


@contextmanager
def listening(app):
    """An address at which the app is served."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        running.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            running.join()


@pytest.fixture
def browser(tmp_path):
    if CHROMIUM is None:
        pytest.skip("no Chromium here: install it to test the page")
    with Browser(tmp_path) as browser:
        browser.size(1280, 900)
        yield browser


def text(browser, selector):
    return browser.evaluate(f"document.querySelector({selector!r}).innerText")


LIVE = "document.getElementById('connection').textContent === 'live'"
CARDS = "document.querySelectorAll('#versions > li').length"


def test_browser_shows_an_edit_and_what_comes_next(engine, browser):
    """From the empty page to a thread, its edit, why it missed and a second thread: without a
    reload, without an error in the console, and with all texts as text."""
    served = Scripted(engine, log_content=True)
    with listening(served.app) as address:
        browser.open(address)
        browser.wait_for(LIVE)
        assert "No requests yet" in text(browser, "nav")
        served.ask(conversation(), MARKUP)
        served.ask(conversation(train="is cancelled"), MARKUP)
        served.settle()
        browser.wait_for(f"{CARDS} === 2 && document.querySelector('.miss') !== null")
        card = text(browser, "#versions > li")
        assert "Version 2" in card and "replace tool result: message 1 (found" in card
        assert "Why it missed: a tool result was replaced" in card and SECRET in card
        assert "(estimated)" in card and "message 1 (tool, content)" in card
        assert "estimated" in text(browser, "#figures")
        assert MARKUP in text(browser, "#detail-title")
        assert browser.evaluate("document.querySelectorAll('main img, main b').length") == 0
        widths = browser.evaluate(
            "[...document.querySelectorAll('#versions .strip')].map(s => s.clientWidth)"
        )
        first, second = (
            sum(answer["tokens"].values())
            for answer in served.state(selected=1)["selected"]["answers"]
        )
        assert widths[0] / widths[1] == pytest.approx(first / second, rel=0.02)
        label = browser.evaluate("document.querySelector('#versions .strip').ariaLabel")
        assert "restored" in label and "recomputed" in label
        served.ask(conversation(), "another")
        browser.wait_for("document.querySelectorAll('#threads li').length === 2")
        assert MARKUP in text(browser, "#detail-title")  # what is looked at stays
        assert browser.complaints == []
    browser.wait_for("document.getElementById('connection').className === 'lost'")
    served.activity.close()


def test_browser_with_keyboard_alone(engine, browser):
    """A key is asked for, wrong and right; arrows and Enter choose a thread; the filter filters."""
    served = Scripted(engine, keys=True)
    for number in range(5):
        served.ask(conversation(turns=1), f"thread {number}", tenant="b")
    served.ask(conversation(turns=1), "of somebody else", tenant="a")
    with listening(served.app) as address:
        browser.open(address)
        browser.wait_for("document.activeElement.id === 'key'")
        browser.type("wrong")
        browser.press("Enter")
        browser.wait_for("document.getElementById('connection').textContent.includes('not known')")
        browser.type("key-b")
        browser.press("Enter")
        browser.wait_for(f"{LIVE} && {CARDS} === 1")
        assert text(browser, "#detail-title") == "Versions of thread 4"
        assert "somebody" not in text(browser, "body")
        browser.evaluate("document.querySelector('#threads button').focus()")
        browser.press("ArrowDown")
        browser.press("ArrowDown")
        browser.press("ArrowUp")
        browser.press("Enter")
        browser.wait_for("document.getElementById('detail-title').textContent.endsWith('thread 3')")
        assert browser.evaluate("document.activeElement.id") == "detail"
        browser.evaluate("document.getElementById('filter').focus()")
        browser.type("d 2")
        browser.wait_for("document.querySelectorAll('#threads li').length === 1")
        kept = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        assert "key-b" not in browser.evaluate(kept)
    served.activity.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_browser_on_a_phone_with_many_threads(engine, browser, dark):
    """Nothing is wider than the window; text and its background differ by 4.5 to 1 at least."""
    served = Scripted(engine)
    seen = served.activity
    answers = []
    engine.observer = answers.append
    served.ask(conversation())
    served.ask(conversation(train="is cancelled"))
    for number in range(200):
        key = ThreadKey(f"thread {number} " + "word" * 30, "a")
        seen(replace(answers[0], thread=key))
    for answered in answers:
        seen(answered)
    with listening(served.app) as address:
        browser.size(390, 800, dark=dark)
        browser.open(address)
        browser.wait_for(f"{LIVE} && {CARDS} === 2")
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390
        assert browser.evaluate("document.querySelectorAll('#threads li').length") == 201
        poor = browser.evaluate(_POOR_CONTRAST)
        assert poor == []
    served.activity.close()


# By the formula for contrast of WCAG 2.1, "contrast ratio" and "relative luminance".
_POOR_CONTRAST = """(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const luminance = (colour) => {
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) => {
      v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (colour !== 'rgba(0, 0, 0, 0)') return colour;
    }
  };
  return [...document.querySelectorAll('body *')]
    .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .filter((e) => e.checkVisibility() && !e.closest('del, ins'))
    .filter((e) => {
      const [a, b] = [getComputedStyle(e).color, behind(e)].map(luminance).sort((x, y) => y - x);
      return (a + 0.05) / (b + 0.05) < 4.5;
    }).map((e) => e.outerHTML);
})()"""
