"""Decisions of a demonstration, for SFT. The driver makes them, and needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import accumulate

import numpy as np

from ragr1_actors.core.content import shifted
from ragr1_actors.core.types import MALFORMED, TokenKind, Trajectory


class SegmentCategory(StrEnum):
    """Four kinds of decision, from RAG-R1 (arXiv:2507.02962, section 3.1)."""

    INTERNAL_ANSWER = "internal_answer"
    """Answer before anything was found."""
    FIRST_SEARCH = "first_search"
    """Search or other action before anything was found."""
    EVIDENCE_ANSWER = "evidence_answer"
    """Answer after a search that found something."""
    FURTHER_SEARCH = "further_search"
    """Search or other action after something was found."""


def decisions(trajectory: Trajectory) -> list[SegmentCategory]:
    """Return the kind of decision of each turn; malformed turns are left out."""
    found: list[SegmentCategory] = []
    has_evidence = False
    for turn in trajectory.turns:
        if turn.action != MALFORMED and turn.num_model_tokens:
            found.append(_category(turn.action, has_evidence))
        has_evidence = has_evidence or any(call.records for call in turn.calls)
    return found


def without_malformed_turns(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory with the tokens of malformed turns as PROMPT, or itself if it has none."""
    chosen = [index for index, turn in enumerate(trajectory.turns) if turn.action != MALFORMED]
    return trajectory if len(chosen) == len(trajectory.turns) else taught(trajectory, chosen, trajectory.num_tokens)


def taught(trajectory: Trajectory, turns: Sequence[int], end: int) -> Trajectory:
    """Return the first ``end`` tokens; tokens of the chosen turns are MODEL, tokens of other turns are PROMPT.

    Rows without a chosen turn are left out.
    """
    kinds = np.where(trajectory.kinds == TokenKind.MODEL, np.uint8(TokenKind.PROMPT), trajectory.kinds)
    positions = trajectory.turn_positions
    for index in turns:
        kinds[positions[index]] = TokenKind.MODEL
    is_own = kinds == TokenKind.MODEL
    rows = [slice(row.start, min(row.stop, end)) for row in trajectory.rows if row.start < end]
    used = [row for row in rows if is_own[row].any()] or rows[:1]
    kept = np.concatenate([np.arange(row.start, row.stop) for row in used])
    starts = accumulate((row.stop - row.start for row in used), initial=0)
    all_images = trajectory.images
    images = [
        placed
        for row, start in zip(used, starts, strict=False)
        for placed in shifted([one for one in all_images if row.start <= one.start < row.stop], start - row.start)
    ]
    return replace(
        trajectory,
        token_ids=trajectory.token_ids[kept],
        kinds=kinds[kept],
        logprobs=np.where(is_own, trajectory.logprobs, np.float32(0))[kept],
        policy_versions=np.where(is_own, trajectory.policy_versions, np.int32(-1))[kept],
        turns=tuple(trajectory.turns[index] for index in turns),
        row_lengths=tuple(row.stop - row.start for row in used) if len(used) > 1 else (),
        images=tuple(images),
    )


def _category(action: str, has_evidence: bool) -> SegmentCategory:
    if action == "answer":
        return SegmentCategory.EVIDENCE_ANSWER if has_evidence else SegmentCategory.INTERNAL_ANSWER
    return SegmentCategory.FURTHER_SEARCH if has_evidence else SegmentCategory.FIRST_SEARCH
