"""Question-answering rows about people and towns that do not exist."""

from __future__ import annotations

from patchkv_agents.context import Conversation
from patchkv_evals.datasets import Passage, QARow
from patchkv_evals.episodes import Measured

FIRST = "Alda Borin Cerys Davik Elowen Farid Greta Halvard Ines Joren Katla Lubos".split()
LAST = "Marrow Nesbit Okafor Pellan Quist Rovere Sandoz Tarkin Ulmer Varga Wexley Yarrow".split()
TOWNS = "Ambleford Brisca Corvale Dunmere Eskholt Farrow Galmoor Hexley Ilvany Jarrow".split()
TOPICS = "Lighthouse Granary Viaduct Orchard Foundry Regatta Quarry Almanac".split()


def name(index: int) -> str:
    """A person's name; twelve of them have no part in common with another."""
    return f"{FIRST[index % 12]} {LAST[(5 * index + index // 12) % 12]}"


def distractor(row: int, index: int) -> Passage:
    """A passage of about 70 words that names neither towns nor people of the rows."""
    title = f"{TOPICS[index % 8]} of the {row + 1}th parish"
    text = (
        f"The {title} was built in stone and oak over {index + 3} summers. It stood empty for a "
        f"long time, and storms took the roof twice. A trust of {20 + 7 * index + row} members "
        "bought it for a small sum, mended the walls, and opened it to visitors on Sundays. There "
        "is a room with maps, another one with tools, and a bench from which the hills can be seen "
        "on clear days. Entry is free, and the keeper tells stories."
    )
    return Passage(title, text, False)


def row(index: int) -> QARow:
    """Row number `index`: of four kinds, asking for a person, a town, a year, or yes or no."""
    person, town, year = name(index), TOWNS[index % 10], str(1840 + 3 * index)
    bridge = f"Bridge number {index + 1}"
    gold = Passage(
        bridge,
        f"{bridge} is an arch of grey stone over the river. It was designed by {person} and opened "
        f"in {year}. The work began in the town of {town}, where the stone was cut and numbered. "
        "Carts took it down to the water.",
        True,
    )
    support = Passage(
        f"Ferry number {index + 1}",
        f"The ferry crosses beside {bridge.lower()}, which took most of its trade. Fishermen still "
        "use it in the mornings, when fog lies on the water and carts are not let over.",
        True,
    )
    question, answers = (
        (f"Who designed {bridge.lower()}, beside the ferry?", (person, f"Engineer {person}")),
        (f"In which town was the stone of {bridge.lower()} cut?", (town,)),
        (f"In which year did {bridge.lower()} open?", (year,)),
        (f"Are ferry and {bridge.lower()} side by side?", ("yes",)),
    )[index % 4]
    distractors = [distractor(index, number) for number in range(8)]
    passages = (*distractors[:3], support, *distractors[3:6], gold, *distractors[6:])
    return QARow(f"row-{index}", "hotpotqa", question, answers, passages)


ROWS = tuple(row(index) for index in range(12))


class WordCounter:
    """Counts words, and four tokens around each message: fast enough for many episodes."""

    def text(self, text: str) -> int:
        return len(text.split())

    def measure(self, conversation: Conversation) -> Measured:
        starts = []
        total = 3
        for message in conversation.messages:
            starts.append(total)
            calls = " ".join(f"{call.name} {call.arguments_json}" for call in message.tool_calls)
            total += 4 + len(f"{message.text} {calls}".split())
        return Measured(total, tuple(starts))
