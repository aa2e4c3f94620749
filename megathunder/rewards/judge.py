"""The reward `judge`: a number between 0 and 1 that another model gives, over any OpenAI-compatible address.

A question that was asked before is answered from memory. A judge that cannot be reached, does not answer in time or
gives no such number is asked again, and is then a fault of the machinery, never a reward of 0. Called by scorer.py.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp

from megathunder.config.reward import RewardConfig
from megathunder.errors import InfrastructureFailure, UserError
from megathunder.registry import REWARDS
from megathunder.rewards.builtin_rewards import label_of
from megathunder.rewards.episode import FinishedEpisode
from megathunder.rewards.functions import RewardContext

PROMPT = """You judge an answer. Compare it with the reference where there is one.

Question:
{prompt}

Reference:
{label}

Answer:
{completion}

How good is the answer? Reply with one number between 0 (wrong) and 1 (right) and nothing else."""
NUMBER = re.compile(r"(?<![\d.])(?:0(?:\.\d+)?|1(?:\.0+)?|\.\d+)(?![\d.]*\d)")
TRIES, WAIT_S = 3, 0.5


class Judge:
    """The judge of one [reward] section, on one event loop."""

    def __init__(self, settings: RewardConfig) -> None:
        self._settings = settings
        self._free = asyncio.Semaphore(settings.judge_concurrency)
        self._known: dict[str, asyncio.Task[float]] = {}
        self._prompt = Path(settings.judge_prompt).read_text() if settings.judge_prompt else PROMPT

    async def ask(self, prompt: str, completion: str, label: str) -> float:
        """The judge's number; equal questions are asked once. Raises InfrastructureFailure."""
        texts = {"{prompt}": prompt, "{completion}": completion, "{label}": label}
        question = re.sub("|".join(map(re.escape, texts)), lambda found: texts[found[0]], self._prompt)
        known = self._known.get(question)
        if known is None or (known.done() and (known.cancelled() or known.exception())):
            known = self._known[question] = asyncio.create_task(self._answer(question))
        return await asyncio.shield(known)

    async def _answer(self, question: str) -> float:
        failure = ""
        for attempt in range(TRIES):
            try:
                async with self._free, asyncio.timeout(self._settings.judge_timeout_s):
                    return await self._request(question)
            except (TimeoutError, aiohttp.ClientError, ValueError, KeyError, IndexError, TypeError) as error:
                failure = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            await asyncio.sleep(WAIT_S * 2**attempt)
        raise InfrastructureFailure(
            f"the judge at {self._settings.judge_url} gave no number in {TRIES} tries "
            f"(reward.judge_timeout_s = {self._settings.judge_timeout_s:g}): {failure}"
        )

    async def _request(self, question: str) -> float:
        key = os.environ.get(self._settings.judge_key_variable, "")
        body = {
            "model": self._settings.judge_model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
        }
        url = f"{self._settings.judge_url.rstrip('/')}/chat/completions"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}: {(await response.text())[:200]}")
            answer: Any = await response.json()
        text = str(answer["choices"][0]["message"]["content"] or "")
        numbers = NUMBER.findall(text)
        if not numbers:
            raise ValueError(f"it said {text[:80]!r}, without a number between 0 and 1")
        return float(numbers[-1])


_judges: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[RewardConfig, Judge]] = WeakKeyDictionary()


@REWARDS.register("judge")
async def judge(completion: str, row: dict[str, Any], trajectory: FinishedEpisode, *, context: RewardContext) -> float:
    """What the judge says of the completion."""
    asked = _judges.setdefault(asyncio.get_running_loop(), {}).setdefault(context.settings, Judge(context.settings))
    try:
        label = label_of(row, context.settings)
    except UserError:
        if context.settings.label:
            raise
        label = "(none)"
    return await asked.ask(trajectory.prompt, completion, label)
