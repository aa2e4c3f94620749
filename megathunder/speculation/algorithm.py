"""SUFFIX as SGLang's registry knows it: speculative to the scheduler, plain decoding to the model.

The scheduler then expects several tokens a step; the model runner captures and runs ordinary decode batches, since
drafts are verified as rows of one (`rows.py`). Drafting reads finished results, so scheduling is synchronous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

NAME = "SUFFIX"


class SuffixAlgorithm(CustomSpecAlgo):
    """What SGLang asks of an algorithm; what is not asked of plug-ins yet is answered by the built-in NONE."""

    def is_speculative(self) -> bool:
        """Asked by the model runner alone, of the shape of its decode batches."""
        return False

    def has_draft_kv(self) -> bool:
        return False

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(SpeculativeAlgorithm.NONE, name)

    def create_future_map(self, *arguments: object, **options: object) -> object:
        return SpeculativeAlgorithm.create_future_map(self, *arguments, **options)

    def handle_server_args(self, server_args: ServerArgs) -> None:
        server_args.disable_overlap_schedule = True
        server_args.enable_mixed_chunk = False
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_steps = 1


def refuse_what_is_not_supported(server_args: ServerArgs) -> None:
    """Raises ValueError, with which the server ends before it loads weights."""
    cfg = server_args
    wrong = {
        "tp_size": (cfg.tp_size, 1),
        "pp_size": (cfg.pp_size, 1),
        "enable_dp_attention": (cfg.enable_dp_attention, False),
        "page_size": (cfg.page_size or 1, 1),
        "disaggregation_mode": (cfg.disaggregation_mode, "null"),
    }
    for name, (seen, expected) in wrong.items():
        if seen != expected:
            raise ValueError(
                f"suffix speculation with {name} = {seen}: expected {expected}, or rollout.speculation = 'off'"
            )
