"""From what a user names (a source, budgets, policies, adapters) to what the library takes: streams, prompts, entries.

Heavy modules are imported inside the functions, so that the command line starts quickly.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpop.budget import Budget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvpop.data import Corpus, SequenceStream
    from kvpop.measure import Entry, RetrievalScores
    from kvpop.policies import Policy
    from kvpop.tasks import RetrievalPrompt

NEEDLE_KEYS = 4
HAYSTACK_TOKENS = 1 << 20
"""Tokens of a prepared corpus that retrieval documents take their text from."""
DEFAULT = Budget.of_slots(256, sinks=4, window=64)


def placement(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """The device and the precision that two options name; "auto" under torchrun: the GPU of this process.

    Raises ValueError for what does not exist here.
    """
    import torch

    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        place = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {device}: no such kind of device; use cpu, cuda or cuda:N") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {device}: this machine has {torch.cuda.device_count()} CUDA devices")
    if place.type == "cuda" and place.index is not None:
        torch.cuda.set_device(place)
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    kinds["auto"] = torch.bfloat16 if place.type == "cuda" else torch.float32
    if dtype not in kinds:
        raise ValueError(f"--dtype must be one of {', '.join(kinds)}, got {dtype!r}")
    return place, kinds[dtype]


def load_model(
    name: str, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:  # fmt: skip
    """``load_base``, with transformers quiet."""
    from transformers.utils import logging

    from kvpop.models import load_base

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return load_base(name, dtype, device)


def read_adapter(directory: Path) -> dict[str, Any]:
    from kvpop.adapter import read_config

    return read_config(directory)


def chosen_budget(
    slots: int | None,
    sinks: int | None,
    window: int | None,
    adapter: Path | None,
    ratio: float | None = None,
    context: int | None = None,
) -> Budget:
    """The options where given, else the adapter's own budget, else 256 slots with 4 sinks and a window of 64.

    Slots may be given as a ``ratio`` of the tokens of a ``context``. Raises ValueError for half of the two, or for both ways.
    """
    if (ratio is None) != (context is None):
        raise ValueError(f"--ratio and --context belong together, got {ratio} and {context}")
    if ratio is not None and slots is not None:
        raise ValueError(f"give either --budget or --ratio and --context, got {slots} and {ratio} of {context}")
    own = Budget(**read_adapter(adapter)["policy"]["budget"]) if adapter is not None else DEFAULT
    sinks, window = own.sinks if sinks is None else sinks, own.window if window is None else window
    if ratio is not None and context is not None:
        return Budget.of_ratio(ratio, context, sinks=sinks, window=window)
    return Budget.of_slots(own.slots if slots is None else slots, sinks=sinks, window=window)


def chosen_policy(
    policy: str, adapter: str | None, budget: int | None, sinks: int | None, window: int | None
) -> tuple[Policy, Path | None, Budget | None]:
    """The policy that the options name, the directory of its adapter if it has one, and its budget if it takes one."""
    from kvpop.adapter import adapter_directory, load_policy
    from kvpop.policies import policy_by_name

    if policy == "oracle":
        raise ValueError(
            "--policy oracle ranks tokens by future attention: it can score a given text, not generate one"
        )
    if adapter is not None and policy != "dense":
        raise ValueError(f"give either --adapter DIR or --policy NAME, got {adapter} and {policy}")
    directory = None if adapter is None else adapter_directory(adapter)
    if directory is None:
        slots = chosen_budget(budget, sinks, window, None)
        return policy_by_name(policy, slots), None, slots
    if "budget" in read_adapter(directory)["policy"]:
        slots = chosen_budget(budget, sinks, window, directory)
        return load_policy(directory, slots), directory, slots
    if any(option is not None for option in (budget, sinks, window)):
        raise ValueError(f"{adapter} has no budget to change: --budget, --sinks and --window do not apply")
    return load_policy(directory), directory, None


def load_entries(
    name: str, dtype: torch.dtype, device: torch.device, adapters: Mapping[str, Path], entries: list[Entry]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[Entry]]:
    """``load_model``, and the entries of ``comparison`` with the weights that their adapters bring.

    Each policy has been attached once, and taken off again: what does not fit the model raises here."""
    from dataclasses import replace

    from kvpop.adapter import changed_weights
    from kvpop.attachment import attach, detach

    base, tokenizer = load_model(name, dtype, device)
    weights = {label: changed_weights(base, directory) for label, directory in adapters.items()}
    entries = [replace(entry, weights=weights.get(entry.label)) for entry in entries]
    for entry in entries:
        attach(base, entry.policy)
    detach(base)
    return base, tokenizer, entries


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model that ``load_base`` knows, without the model."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from kvpop.models import model_location

    logging.set_verbosity_error()
    where = model_location(name)
    return AutoTokenizer.from_pretrained(where, local_files_only=Path(where).is_dir())


def check_data(data: str, length: int) -> None:
    """What is wrong with ``--data`` for sequences of so many tokens, before a model is loaded; raises as its readers do."""
    from kvpop.data import Prepared, is_prepared, rows_from

    if is_prepared(data):
        Prepared(data).check(length)
    else:
        rows_from(data)


def training_stream(
    data: str | Corpus,
    tokenizer: Any,
    length: int,
    batch_size: int,
    seed: int,
    tokens: int,
    retrieval_share: float,
) -> SequenceStream:
    """Sequences of ``length`` tokens, ``retrieval_share`` of them retrieval documents, the others from ``data``.

    A directory that ``kvpop prepare`` wrote is used as it is and stays on disk, all of it. Of anything else, or of a corpus
    with filters, the first ``tokens`` tokens are read and packed in memory. Raises as ``Reader`` and ``Prepared`` do, and
    ValueError for a prepared corpus of another length or tokenizer.
    """
    from kvpop.data import Corpus, is_prepared

    if isinstance(data, str) and is_prepared(data):
        return _prepared_stream(data, tokenizer, length, batch_size, seed, retrieval_share)
    corpus = Corpus(data) if isinstance(data, str) else data
    return _packed_stream(corpus, tokenizer, length, batch_size, seed, tokens, retrieval_share)


def document_curves(
    model: PreTrainedModel, stream: SequenceStream, budget: Budget, count: int, policy: Policy | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Tensor:  # fmt: skip
    """What budgets by head come from (``loss_curves``), over the longest document of each of the first ``count`` sequences.

    ``policy`` ranks tokens; None: the oracle does. Raises ValueError if the documents are too short to rank ``budget.long``
    tokens.
    """
    from kvpop.calibration import loss_curves
    from kvpop.core import Target
    from kvpop.policies import Oracle

    texts = longest_documents(stream, count)
    longest = max(map(len, texts))
    if longest < 2 * budget.slots:
        raise ValueError(
            f"budgets by head need documents of at least {2 * budget.slots} tokens, twice the slots of a KV head; the longest "
            f"of the first {min(count, len(stream))} sequences has {longest}"
        )
    ranking = policy or Oracle(budget, Target(lse="dense", power=2.0), decay=-2e-4)
    return loss_curves(model, texts, ranking, sinks=budget.sinks, window=budget.window, tick=tick)


def longest_documents(stream: SequenceStream, count: int) -> list[Tensor]:
    """The longest document (token ids [S]) of each of the first ``count`` sequences, but for those not half as long as the
    longest of them."""
    import torch

    columns = stream.sequences.columns(range(min(count, len(stream))))
    texts = []
    for ids, documents in zip(columns["input_ids"], columns["document_ids"]):
        sizes = [(int((documents == d).sum()), d) for d in range(int(documents.max()) + 1)]
        texts.append(torch.from_numpy(ids[documents == max(sizes)[1]].astype("int64")))
    longest = max(map(len, texts))
    return [text for text in texts if 2 * len(text) >= longest]


def _retrieval_count(share: float, sequences: int) -> int:
    return max(1, round(share / (1 - share) * sequences)) if share else 0


def _packed_stream(
    corpus: Corpus, tokenizer: Any, length: int, batch_size: int, seed: int, tokens: int, retrieval_share: float
) -> SequenceStream:
    import numpy as np

    from kvpop.data import PackedSequence, Reader, SequenceStream, pack
    from kvpop.tasks import training_retrieval_document

    pieces = [piece for document in Reader(corpus, tokenizer, length, tokens) for piece in document]
    shared = corpus.packing == "shared"
    sequences = list(pack(pieces, length, tokenizer.pad_token_id or 0, shared=shared, seed=seed))
    haystack = np.concatenate(pieces).tolist() if retrieval_share else []
    for i in range(_retrieval_count(retrieval_share, len(sequences))):
        prompt = training_retrieval_document(tokenizer, haystack, length, np.random.default_rng([seed, i]))
        sequences.append(PackedSequence.from_pieces([np.asarray(prompt.tokens)], length))
    return SequenceStream(sequences, batch_size, seed)


def _prepared_stream(
    directory: str, tokenizer: Any, length: int, batch_size: int, seed: int, retrieval_share: float
) -> SequenceStream:
    """Retrieval documents are made when they are asked for: there may be too many to hold."""
    import numpy as np

    from kvpop.data import Generated, Joined, Prepared, SequenceStream
    from kvpop.tasks import training_retrieval_document

    prepared = Prepared(directory)
    prepared.check(length, tokenizer)
    count = _retrieval_count(retrieval_share, len(prepared))
    if not count:
        return SequenceStream(prepared, batch_size, seed)
    first = prepared.columns(range(min(len(prepared), -(-HAYSTACK_TOKENS // length))))
    haystack = first["input_ids"][first["document_ids"] >= 0].tolist()

    def document(i: int) -> list[int]:
        return training_retrieval_document(tokenizer, haystack, length, np.random.default_rng([seed, i])).tokens

    made = Generated(document, count, length, key=f"retrieval {seed}")
    return SequenceStream(Joined([prepared, made]), batch_size, seed)


def evaluation_texts(
    data: str, tokenizer: Any, count: int, length: int, longest: int
) -> tuple[list[Tensor], list[int]]:
    """``count`` texts of ``length`` tokens (other documents first, then later pieces), and a haystack for ``longest``."""
    import torch

    from kvpop.data import is_prepared

    if is_prepared(data):
        raise ValueError(f"{data} is a prepared corpus: what is measured are whole documents, give their source")

    from kvpop.data import documents_from

    documents: list[list[int]] = []
    for document in documents_from(data, tokenizer):
        documents.append(document.tolist())
        if sum(len(d) >= length for d in documents) >= count and sum(map(len, documents)) >= longest:
            break
    ends = range(length, max(map(len, documents)) + 1, length)
    pieces = [document[end - length : end] for end in ends for document in documents if len(document) >= end]
    if len(pieces) < count:
        raise ValueError(f"--texts {count}: {data} has only {len(pieces)} pieces of {length} tokens")
    return [torch.tensor(piece) for piece in pieces[:count]], [token for document in documents for token in document]


def retrieval_prompts(
    tokenizer: Any, haystack: list[int], lengths: list[int], depths: list[float], passkeys: int, needles: int, seed: int
) -> list[RetrievalPrompt]:
    import numpy as np

    from kvpop.tasks import needle_prompt, passkey_prompt

    prompts = []
    for length in lengths:
        for i in range(passkeys):
            for j, depth in enumerate(depths):
                prompts.append(
                    passkey_prompt(tokenizer, haystack, length, depth, np.random.default_rng([seed, length, i, j]))
                )
        for i in range(needles):
            rng = np.random.default_rng([seed, length, i])
            prompts.append(needle_prompt(tokenizer, haystack, length, NEEDLE_KEYS, rng))
    return prompts


def retrieval_cells(task: str, scores: RetrievalScores, depths: list[float]) -> list[dict[str, Any]]:
    """Results by length and depth; an answer counts at the nearest of ``depths``."""
    cells: dict[tuple[int, float], list[int]] = {}
    for i, (length, depth) in enumerate(zip(scores.length, scores.depth)):
        cells.setdefault((length, min(depths, key=lambda place: abs(place - depth))), []).append(i)
    return [
        {
            "task": task,
            "length": length,
            "depth": depth,
            "exact": sum(scores.exact[i] for i in members) / len(members),
            "nll": sum(scores.nll[i] for i in members) / len(members),
            "answers": len(members),
        }
        for (length, depth), members in sorted(cells.items())
    ]


def comparison(
    adapters: Mapping[str, Path], policies: list[str], budgets: list[int], sinks: int | None, window: int | None
) -> list[Entry]:
    """Dense, then every policy and every adapter (label: directory) at every budget (without budgets: the adapters' own, or
    256), then the adapters whose policies have no budget.

    Weights that an adapter brings are not in place yet: ``adapter.changed_weights`` needs the model.
    """
    from kvpop.adapter import load_policy
    from kvpop.measure import Entry
    from kvpop.policies import Dense, policy_by_name

    sized = {label: path for label, path in adapters.items() if "budget" in read_adapter(path)["policy"]}
    first = next(iter(sized.values()), None)
    entries = [Entry("dense", None, Dense())]
    own = {chosen_budget(None, sinks, window, directory).slots for directory in sized.values()}
    for slots in sorted(set(budgets) or own or {chosen_budget(None, sinks, window, None).slots}):
        for name in dict.fromkeys(policies):
            policy = policy_by_name(name, chosen_budget(slots, sinks, window, first))
            if name != "dense":
                entries.append(Entry(name, slots, policy))
        for label, directory in sized.items():
            trained = load_policy(directory, chosen_budget(slots, sinks, window, directory))
            entries.append(Entry(label, slots, trained))
    return entries + [Entry(name, None, load_policy(adapters[name])) for name in adapters if name not in sized]
