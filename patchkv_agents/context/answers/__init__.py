"""Takes a model's answers apart: text, reasoning and calls of tools; whole or as they come."""

from patchkv_agents.context.answers.answer import Answer, AnswerPiece, InvalidCall
from patchkv_agents.context.answers.parser import AnswerParser
from patchkv_agents.context.answers.style import AnswerStyle, parse_answer

__all__ = [
    "Answer",
    "AnswerParser",
    "AnswerPiece",
    "AnswerStyle",
    "InvalidCall",
    "parse_answer",
]
