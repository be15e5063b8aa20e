"""Programs that hang on four ranks, and what the notebook has to say of each."""

from __future__ import annotations

from hangs.collectives import COLLECTIVES
from hangs.elsewhere import ELSEWHERE
from hangs.hang import Hang as Hang
from hangs.held_out import HELD_OUT
from hangs.messages import MESSAGES
from hangs.strangers import STRANGERS

HANGS = [*COLLECTIVES, *MESSAGES, *ELSEWHERE, *STRANGERS, *HELD_OUT]
