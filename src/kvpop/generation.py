"""What ``generate`` does with an attached model: it gets a bounded cache, or says before the first token why it cannot."""

from __future__ import annotations

import threading
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from transformers.generation import GenerationMixin, GenerationMode, UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.candidate_generator import AssistedCandidateGeneratorDifferentTokenizers

from kvpop.architecture import attached_policies, cache_argument, rope_type
from kvpop.cache import ROLLBACK, BoundedCache
from kvpop.slots import CHUNK

HOOKS = (
    "generate", "_prepare_cache_for_generation", "_get_candidate_generator", "_get_logits_processor",
    "prepare_inputs_for_generation", "generate_batch", "init_continuous_batching", "continuous_batching_context_manager",
)  # fmt: skip
"""The methods of ``generate`` that ``attach`` may put over the class's own, on the model alone."""


def generation_hooks(model: Any) -> dict[str, Any]:
    """The methods that ``generate`` calls on this model in place of its class's own."""
    name = cache_argument(model)

    def prepare_cache(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, longest: int
    ) -> Any:
        check_generation(self, generation_config, model_kwargs, mode)
        if model_kwargs.get(name) is None and generation_config.use_cache is not False:
            assistant = bool(getattr(generation_config, "is_assistant", False))
            rollback = 1 if mode == GenerationMode.ASSISTED_GENERATION else 0  # ``candidates`` says how much
            if assistant:
                rollback = min(max(ROLLBACK, (generation_config.max_new_tokens or 0) + 1), CHUNK)
            expanded = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            returned = bool(generation_config.return_dict_in_generate)
            cache = BoundedCache(self, rollback=rollback) if rollback else fresh_cache(self, expanded, returned)
            if assistant:  # early exit runs the first layers only
                del cache.layers[self.config.get_text_config().num_hidden_layers :]
            model_kwargs[name] = cache
        return type(self)._prepare_cache_for_generation(
            self, generation_config, model_kwargs, mode, batch_size, longest
        )

    @wraps(type(model).generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        lent = len(_KEPT.lent)
        try:
            made = type(self).generate(self, *args, **kwargs)
            for given in map(kwargs.get, dict.fromkeys((name, "past_key_values"))):
                if isinstance(given, BoundedCache):
                    given.check_reserved()
            return made
        finally:
            del _KEPT.lent[lent:]

    def candidates(self: Any, *args: Any, **kwargs: Any) -> Any:
        generator = type(self)._get_candidate_generator(self, *args, **kwargs)
        need_rollback(generator, kwargs["model_kwargs"][name])
        return generator

    def processors(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = type(self)._get_logits_processor(self, *args, **kwargs)
        for processor in found:
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor) and processor.model is self:
                context: dict[str, Any] = processor.unconditional_context
                context[name] = None if context["use_cache"] is False else BoundedCache(self)
        return found

    def continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "continuous batching (generate_batch) cannot be used while a kvpop policy is attached, it pages a cache of its "
            "own: use generate with a left-padded batch, or detach"
        )

    hooks: dict[str, Any] = {
        "generate": generate,
        "_prepare_cache_for_generation": prepare_cache,
        "_get_candidate_generator": candidates,
        "_get_logits_processor": processors,
    }
    hooks |= {each: continuous_batching for each in HOOKS if "batch" in each and hasattr(type(model), each)}
    if _recomputes(model):

        def prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
            mixin = isinstance(kwargs.get(name), BoundedCache)
            return (GenerationMixin if mixin else type(self)).prepare_inputs_for_generation(self, *args, **kwargs)

        hooks["prepare_inputs_for_generation"] = prepare_inputs
    return hooks


class Kept(threading.local):
    """The cache that ``generate`` last made for each model, and those that calls under way use; in every thread its own."""

    def __init__(self) -> None:
        self.caches: WeakKeyDictionary[Any, BoundedCache] = WeakKeyDictionary()
        self.lent: list[BoundedCache] = []


_KEPT = Kept()


def fresh_cache(model: Any, rows: int, returned: bool) -> BoundedCache:
    """An empty cache for one call of ``generate``, allocated if it can be: a compiled pass cannot make stores.

    On a GPU a captured graph finds its tensors by address. So the cache of the last call in this thread is used again, as
    transformers does with its static caches, if it has as many rows, no call under way uses it, and it is not ``returned``.
    """
    cache = BoundedCache(model)
    if not cache.is_compileable:
        return cache
    if returned or not captures(model):
        cache.allocate(rows)
        return cache
    last = _KEPT.caches.get(model)
    if last is not None and all(last is not lent for lent in _KEPT.lent) and _fits(last, cache, rows):
        cache = last
        cache.reset()
    else:
        cache.allocate(rows)
        _KEPT.caches[model] = cache
    _KEPT.lent.append(cache)
    return cache


def captures(model: Any) -> bool:
    """Whether transformers captures the decoding step of a model as a CUDA graph."""
    return model.device.type == "cuda"


def _fits(last: BoundedCache, fresh: BoundedCache, rows: int) -> bool:
    """Whether a used cache is what ``fresh`` would be with so many rows."""
    if last.policies != fresh.policies or last.rows != rows or len(last.stores) != len(last.layers):
        return False
    pairs = [(store.keys, layer.weight) for store, layer in zip(last.stores, fresh.bounded_layers)]
    return all((keys.dtype, keys.device) == (weight.dtype, weight.device) for keys, weight in pairs)


def _recomputes(model: Any) -> bool:
    """Whether ``generate`` of this class throws its cache away where the rotary embedding changes (Phi-3)."""
    own = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    return own and hasattr(model.config, "original_max_position_embeddings")


def check_generation(model: Any, generation_config: Any, model_kwargs: dict[str, Any], mode: Any) -> None:
    """Raise ValueError, before the first token, for what ``generate`` cannot do with an attached model."""
    if generation_config.cache_implementation is not None:
        raise ValueError(
            f"cache_implementation={generation_config.cache_implementation!r} cannot be used while a kvpop policy "
            "is attached: leave it unset"
        )
    if generation_config.output_attentions:
        raise ValueError(
            "output_attentions: kvpop's attention returns no weights; leave it unset, or observe a cache-free pass with "
            "kvpop=SequencePass(documents, observe=...)"
        )
    if mode is not None and str(getattr(mode, "value", mode)) == "contrastive_search":
        raise ValueError("contrastive search (penalty_alpha) takes caches apart: sample or use beams, or detach")
    for field in ("use_mtp", "speculation_type"):
        if getattr(generation_config, field, None):
            raise ValueError(
                f"{field}={getattr(generation_config, field)!r} cannot be used while a kvpop policy is attached: draft with "
                "prompt_lookup_num_tokens or an assistant_model"
            )
    schedule = model.generation_config.num_assistant_tokens_schedule
    if getattr(generation_config, "is_assistant", False) and schedule not in (None, "constant"):
        raise ValueError(_GROWING_DRAFT.format(schedule))
    compiled = getattr(model, "_compiled_call_impl", None) or getattr(model.forward, "_torchdynamo_orig_callable", None)
    if compiled is not None and generation_config.use_cache is not False:
        raise ValueError(
            f"{type(model).__name__} is compiled itself, and with it the pass over the prompt, which looks at its values: "
            "leave it as it is and give generate a compile_config=CompileConfig(...)"
        )
    cache = model_kwargs.get(cache_argument(model))
    if cache is not None and not isinstance(cache, BoundedCache):
        raise ValueError(
            f"a {type(cache).__name__} was given: with a policy attached the cache must be a kvpop.BoundedCache(model)"
        )
    if cache is not None and any(a.policy is not b for a, b in zip(cache.bounded_layers, attached_policies(model))):
        raise ValueError(
            "this cache belongs to another model, or to a policy that is no longer attached: make a new "
            "BoundedCache(model)"
        )
    mask = model_kwargs.get("attention_mask")
    covers = mask.shape[-1] if mask is not None else getattr(generation_config, "_mask_length", None)
    if cache is not None and covers is not None and covers <= (past := int(cache.get_seq_length())):
        raise ValueError(
            f"{covers} tokens were given to a cache that has taken in {past}: give the whole text, or only what is new with an "
            "attention_mask over everything"
        )
    position_ids = model_kwargs.get("position_ids")
    if _recomputes(model) and rope_type(model) == "longrope" and position_ids is not None:
        limit = model.config.original_max_position_embeddings
        if position_ids.shape[-1] <= limit < generation_config.max_length and generation_config.use_cache is not False:
            raise ValueError(
                f"{type(model).__name__} changes its rotary embedding at {limit} tokens and takes everything in again, which "
                f"a bounded cache cannot: end before (max_length={limit}), start beyond, or give use_cache=False"
            )


_GROWING_DRAFT = (
    "num_assistant_tokens_schedule={!r} lets the draft grow without bound, and with it what must be rolled back: set it to "
    "'constant'"
)


def need_rollback(generator: Any, cache: Any) -> None:
    """Let the cache of assisted decoding take back a whole draft; ValueError if a given one cannot."""
    if not isinstance(cache, BoundedCache):
        return
    schedule = getattr(getattr(generator, "assistant_generation_config", None), "num_assistant_tokens_schedule", None)
    if schedule not in (None, "constant"):
        raise ValueError(_GROWING_DRAFT.format(schedule))
    draft = getattr(generator, "num_output_tokens", None) or int(getattr(generator, "num_assistant_tokens", CHUNK - 1))
    if draft >= CHUNK:
        raise ValueError(f"drafts of {draft} tokens cannot be rolled back: make them {CHUNK - 1} at most")
    need = min(draft + 1, CHUNK)
    if isinstance(generator, AssistedCandidateGeneratorDifferentTokenizers):
        need = CHUNK  # how many tokens of this model a draft makes is known only once it is made
    for policy in cache.policies:
        policy.check_rollback()
    for layer in cache.bounded_layers:
        if layer.slots is None:
            layer.rollback = max(layer.rollback, need)
        elif layer.rollback < need:
            raise ValueError(
                f"assisted decoding takes back up to {need} tokens, but this cache can take back {layer.rollback}: make it "
                f"with BoundedCache(model, rollback={need})"
            )
