"""Rules that choose rows by attention, one a file. A new one is a file and an entry here."""

from patchkv_agents.recovery.methods.base import AttentionRule
from patchkv_agents.recovery.methods.rules.blocks import Blocks
from patchkv_agents.recovery.methods.rules.combined import Combined
from patchkv_agents.recovery.methods.rules.contiguous import Contiguous
from patchkv_agents.recovery.methods.rules.edited import Edited
from patchkv_agents.recovery.methods.rules.question import Question
from patchkv_agents.recovery.methods.rules.tokens import Tokens

Rule = Blocks | Tokens | Contiguous | Edited | Combined | Question

__all__ = [
    "AttentionRule",
    "Blocks",
    "Combined",
    "Contiguous",
    "Edited",
    "Question",
    "Rule",
    "Tokens",
]
