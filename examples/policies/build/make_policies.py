"""Makes the two policies that ship with the project: a small student that is often wrong and a teacher that is not.

    tokenizer   byte-level BPE, 512 entries, digits apart, trained on demonstrations
    teacher     supervised on sound demonstrations, from random weights
    student     the teacher, then supervised on demonstrations that mostly follow wrong habits

    python examples/policies/build/make_policies.py --out examples/policies          (about 8 minutes on one core)

The results are Hugging Face folders (Qwen3 architecture, 0.66M parameters, fp32). Success is measured by sampling
held-out tasks with transformers; commands run in Python's emulation of the demonstration commands.
"""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.policies.build.demonstrations import Demonstration, demonstrate
from examples.policies.build.emulator import EmulatedShell, emulated_reward
from megathunder.config.rollout import RolloutConfig
from megathunder.config.tasks import TasksConfig
from megathunder.tasks import ChatFormat, RunCommand, Task, build_source, observation_text, parse_action

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ ('' if loop.first else '\\n') + '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ (' ' if message['role'] == 'tool' else '') + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{{ '\\n<|im_start|>assistant\\n' if add_generation_prompt else '' }}"
)
CHARACTERS, NEW_TOKENS = RolloutConfig().observation_characters, RolloutConfig().max_new_tokens
DEMONSTRATION_SEED = 1_000_003  # of tasks no training run draws by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the policies are made."""

    out: Path = Path("examples/policies")
    """Folder that gets `student/`, `teacher/` and MODEL_CARD.md."""
    demonstrations: int = 24000
    """Demonstrations of each sort."""
    teacher_steps: int = 2500
    """Optimizer steps of the teacher."""
    student_steps: int = 600
    """Further steps that turn the teacher into the student."""
    batch: int = 32
    """Demonstrations a step."""
    teacher_lr: float = 2e-3
    """Peak learning rate of the teacher."""
    student_lr: float = 1e-3
    """Peak learning rate of the student."""
    soundness: float = 0.32
    """Share of the student's demonstrations that are sound."""
    evaluation_tasks: int = 280
    """Held-out tasks that success is measured on."""
    seed: int = 0
    """Seed of demonstrations, weights and order."""


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenised demonstration: [T] ids, [T] mask with 1 on the demonstrator's tokens."""

    ids: list[int]
    mask: list[int]


# ------------------------------------------------------------------------------------------------ data


def build_tokenizer(demonstrations: list[Demonstration]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with 512 entries; digits are tokens of their own, so numbers are copied digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for d in demonstrations for text in spoken(d))
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    fast.add_special_tokens({"additional_special_tokens": [START]})
    fast.chat_template = TEMPLATE
    return fast


def spoken(demonstration: Demonstration) -> Iterator[str]:
    """The texts of a demonstration, as they stand between special tokens."""
    yield f"user\n{demonstration.prompt}"
    for command, seen in demonstration.turns:
        yield f"\nassistant\n{command}"
        yield f"\ntool\n {seen}"
    yield f"submit {demonstration.answer}"


def encode(demonstration: Demonstration, chat: ChatFormat, tokenizer: PreTrainedTokenizerFast) -> Example:
    """Exactly the tokens that the agent loop would have produced."""
    ids = chat.prompt_ids(demonstration.prompt)
    mask = [0] * len(ids)
    turns = [*demonstration.turns, (f"submit {demonstration.answer}", None)]
    for command, seen in turns:
        action = [*tokenizer.encode(command, add_special_tokens=False), chat.end_token_id]
        context = [] if seen is None else chat.observation_ids(seen)
        ids += action + context
        mask += [1] * len(action) + [0] * len(context)
    return Example(ids, mask)


def batches(examples: list[Example], size: int, rng: random.Random) -> Iterator[list[Example]]:
    """Endless batches of examples of similar length."""
    while True:
        order = rng.sample(examples, len(examples))
        for at in range(0, len(order) - 8 * size + 1, 8 * size):
            window = sorted(order[at : at + 8 * size], key=lambda e: len(e.ids))
            cut = [window[i : i + size] for i in range(0, len(window), size)]
            yield from rng.sample(cut, len(cut))


def padded(rows: list[list[int]], *, left: bool = False) -> torch.Tensor:
    """[B, T] with zeros on the free side."""
    width = max(map(len, rows))
    return torch.tensor([[0] * (width - len(r)) + r if left else r + [0] * (width - len(r)) for r in rows])


# ------------------------------------------------------------------------------------------------ learning


def new_model(vocabulary: int) -> Qwen3ForCausalLM:
    """Random weights of the shipped architecture."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=384,
            tie_word_embeddings=True,
            max_position_embeddings=2048,
            bos_token_id=None,
            pad_token_id=0,
            eos_token_id=2,
        )
    )


def learn(model: Qwen3ForCausalLM, data: Iterator[list[Example]], steps: int, peak: float) -> None:
    """Mean negative log-likelihood of the demonstrator's tokens; warm-up, then cosine to a tenth of the peak."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    warm = max(1, min(50, steps // 10))
    model.train()
    started = time.monotonic()
    for step in range(steps):
        cosine = 0.55 + 0.45 * torch.cos(torch.tensor(torch.pi * step / steps)).item()
        for group in optimizer.param_groups:
            group["lr"] = peak * min((step + 1) / warm, cosine)
        batch = next(data)
        ids, mask = padded([e.ids for e in batch]), padded([e.mask for e in batch])
        logits = model(input_ids=ids).logits[:, :-1].float()
        chosen = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
        loss = -(chosen * mask[:, 1:]).sum() / mask[:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}  {time.monotonic() - started:.0f} s", flush=True)
    model.eval()


# ------------------------------------------------------------------------------------------------ measuring


@torch.no_grad()
def sample(
    model: Qwen3ForCausalLM, contexts: list[list[int]], temperature: float, end: int, new_tokens: int = NEW_TOKENS
) -> list[list[int]]:
    """One turn for every context: the new tokens, `end` included where it was reached. Temperature 0 is greedy."""
    ids = padded(contexts, left=True)
    attention = padded([[1] * len(c) for c in contexts], left=True)
    positions, cache = (attention.cumsum(1) - 1).clamp(min=0), DynamicCache(config=model.config)
    out: list[list[int]] = [[] for _ in contexts]
    for _ in range(new_tokens):
        state = model(
            input_ids=ids, attention_mask=attention, position_ids=positions, past_key_values=cache, logits_to_keep=1
        )
        logits = state.logits[:, -1].float()
        greedy = logits.argmax(-1, keepdim=True)
        ids = torch.multinomial((logits / temperature).softmax(-1), 1) if temperature else greedy
        for row, token in zip(out, ids[:, 0].tolist(), strict=True):
            if end not in row:
                row.append(token)
        if all(end in row for row in out):
            break
        attention = torch.cat([attention, torch.ones_like(ids)], 1)
        positions = attention.sum(1, keepdim=True) - 1
    return out


def success(
    model: Qwen3ForCausalLM, chat: ChatFormat, tasks: list[Task], temperature: float, seed: int = 1
) -> dict[str, float]:
    """Mean reward by kind and over `all`, one episode a task."""
    torch.manual_seed(seed)
    shells, rewards = [EmulatedShell(t) for t in tasks], [0.0] * len(tasks)
    contexts, live = [chat.prompt_ids(t.prompt) for t in tasks], list(range(len(tasks)))
    for turn in range(max(t.max_turns for t in tasks)):
        sampled = sample(model, [contexts[i] for i in live], temperature, chat.end_token_id) if live else []
        goes_on = []
        for i, tokens in zip(live, sampled, strict=True):
            action = parse_action(chat.action_text(tokens))
            if tokens[-1] != chat.end_token_id or turn + 1 > tasks[i].max_turns:
                continue
            if isinstance(action, RunCommand):
                seen = observation_text(shells[i].run(action.command), CHARACTERS)
                contexts[i] += tokens + chat.observation_ids(seen)
                goes_on.append(i)
            else:
                rewards[i] = emulated_reward(tasks[i], shells[i], action.answer)
        live = goes_on
    by_kind: dict[str, list[float]] = defaultdict(list)
    for task, reward in zip(tasks, rewards, strict=True):
        by_kind[task.kind].append(reward)
        by_kind["all"].append(reward)
    return {kind: round(sum(r) / len(r), 3) for kind, r in sorted(by_kind.items())}


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A Hugging Face folder that transformers, SGLang and the learner read."""
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)


CARD = """# The policies in this folder

`student` and `teacher` are models of the Qwen3 architecture (3 layers, hidden 128, 4 heads, 2 KV heads, head size 32,
feed-forward 384, tied embeddings, {parameters:,} parameters, fp32) for the shell tasks of `megathunder/tasks/shell.py`.
They know nothing else. The tokenizer is a byte-level BPE with {vocabulary} entries and separate digits.

- **teacher**: supervised on {demonstrations:,} scripted sound demonstrations, {teacher_steps} steps of {batch}.
- **student**: the teacher, then {student_steps} steps on demonstrations of which {soundness:.0%} are sound and the rest
  follow a wrong habit (`examples/policies/build/demonstrations.py`). Sampled, it is right sometimes; greedy,
  mostly wrong.

Success on {evaluation_tasks} held-out tasks (disjoint in content from every training task), one episode each:

{table}

Made by `python examples/policies/build/make_policies.py --seed {seed}` on one CPU core, from generated data only.
License: that of the repository.
"""


def card(recipe: Recipe, model: Qwen3ForCausalLM, results: dict[str, dict[str, dict[str, float]]]) -> str:
    """MODEL_CARD.md: how the policies were made and what they can do."""
    kinds = list(next(iter(next(iter(results.values())).values())))
    lines = [f"| policy | {' | '.join(kinds)} |", f"|---|{'--:|' * len(kinds)}"]
    for name, by_temperature in results.items():
        for temperature, by_kind in by_temperature.items():
            lines.append(f"| {name}, {temperature} | {' | '.join(f'{by_kind[k]:.2f}' for k in kinds)} |")
    settings = {name: getattr(recipe, name) for name in Recipe.__dataclass_fields__}
    parameters = sum(p.numel() for p in model.parameters())
    table = "\n".join(lines)
    return CARD.format(**settings, parameters=parameters, vocabulary=model.config.vocab_size, table=table)


def main(recipe: Recipe) -> None:
    """Demonstrations, tokenizer, teacher, student, card."""
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(1)
    rng = random.Random(recipe.seed)
    source = build_source(TasksConfig(seed=DEMONSTRATION_SEED, size=recipe.demonstrations, latency_scale=0.0))
    tasks = source.take(recipe.demonstrations)
    heldout = source.heldout(recipe.evaluation_tasks)
    sound = [demonstrate(t, rng, 1.0, CHARACTERS) for t in tasks]
    sloppy = [demonstrate(t, rng, recipe.soundness, CHARACTERS) for t in tasks]
    tokenizer = build_tokenizer(sound[:4000] + sloppy[:4000])
    chat = ChatFormat(tokenizer)
    model = new_model(len(tokenizer))
    results = {}
    for name, demonstrations, steps, peak in (
        ("teacher", sound, recipe.teacher_steps, recipe.teacher_lr),
        ("student", sloppy, recipe.student_steps, recipe.student_lr),
    ):
        data = batches([encode(d, chat, tokenizer) for d in demonstrations], recipe.batch, rng)
        learn(model, data, steps, peak)
        results[name] = {f"temperature {t:g}": success(model, chat, heldout, t) for t in (1.0, 0.0)}
        print(name, json.dumps(results[name]), flush=True)
        save(model, tokenizer, recipe.out / name)
    (recipe.out / "MODEL_CARD.md").write_text(card(recipe, model, results))


if __name__ == "__main__":
    main(tyro.cli(Recipe, description=__doc__))
