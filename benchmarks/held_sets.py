"""How often a bounded cache and the training mask disagree in low precision, on a real model.

Both rank the same tokens; in float64 the sets are equal (tests/test_invariant.py). Here a text goes once through the model as
a whole, and once through a bounded cache: half of it as a prompt, the rest token by token. Reported is the share of long-range
slots at the last query whose token differs, and the largest difference of the last logits' log-probabilities.

    python benchmarks/held_sets.py --model smollm2 --adapter out/demo/kvpop --tokens 1024 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import torch
import transformers

import kvpop
from kvpop.attachment import attached_policies, cache_argument
from kvpop.documents import Documents
from kvpop.models import load_base
from kvpop.policies import LayerView, SequencePass


@torch.no_grad()
def compare(model, ids: torch.Tensor) -> dict[str, float]:
    expiry: dict[int, torch.Tensor] = {}

    def observe(view: LayerView) -> None:
        expiry[view.layer] = view.expiry[0].cpu()

    length, device = ids.shape[1], ids.device
    whole = model(
        ids, use_cache=False, kvpop=SequencePass(Documents.single(1, length, device), observe=observe)
    ).logits[0, -1]
    cache = kvpop.BoundedCache(model)
    feed = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}
    model(ids[:, : length // 2], **feed)
    started = time.perf_counter()
    for t in range(length // 2, length):
        stepped = model(ids[:, t : t + 1], **feed).logits[0, -1]
    seconds = (time.perf_counter() - started) / (length - length // 2)
    budget = attached_policies(model)[0].budget
    differ, slots = 0, 0
    for layer, heads in enumerate(cache.held_positions()):
        for head, held in enumerate(heads[0]):
            kept = {t for t in range(length) if length - 1 < expiry[layer][head, t]}
            differ += len(kept - set(held))
            slots += budget.long
    difference = (whole.float().log_softmax(-1) - stepped.float().log_softmax(-1)).abs().max()
    return {
        "differing_share": differ / slots,
        "max_logprob_difference": float(difference),
        "ms_per_token": seconds * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--token-file", help="uint16 token ids, instead of held-out champ texts")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.dtype:
        model, tokenizer = load_base(args.model, getattr(torch, name), args.device)
        kvpop.load(model, args.adapter)
        if args.token_file:
            import numpy as np

            stream = np.fromfile(args.token_file, dtype=np.uint16).astype("int64")
            texts = [torch.from_numpy(stream[i * args.tokens : (i + 1) * args.tokens]) for i in range(args.texts)]
        else:
            from kvpop.corpora import champ_texts

            texts = [
                torch.tensor(tokenizer.encode(text)[: args.tokens])
                for _, text in zip(range(args.texts), champ_texts("test"))
            ]
        for i, text in enumerate(texts):
            row = {"dtype": name, "text": i, "tokens": len(text), **compare(model, text[None].to(args.device))}
            rows.append(row)
            print(row, flush=True)
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.machine()
    versions = {"kvpop": kvpop.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    report = {
        "command": " ".join(["python benchmarks/held_sets.py", *sys.argv[1:]]),
        "device": device,
        "versions": versions,
        "rows": rows,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
