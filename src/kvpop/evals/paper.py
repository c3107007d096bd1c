"""The figures of the paper that ours stand beside, as printed: two decimals, no intervals.

Read with care: the abstract and the conclusion give retentions of KVpop (95 % and 94 % on the 4B model, 95 % and 99 % on the 8B
model, at 75 % and 88 % compression) that are not those of Table 1 (98 % and 97 %, 100 % and 100 %). In Table 1, StreamLLM on
the 8B model has the same figures at both ratios, and TOVA on the 4B model at 75 % has a smaller HMMT 2511 than at 88 %.
"""

from __future__ import annotations

from dataclasses import dataclass

CITATION = (
    "N. Schmidinger, A.-R. Hartl, D. Stap, T. Schmied, S. Böck, G. Klambauer, S. Hochreiter: KVpop - Key-Value Cache "
    "Compression with Predictive Online Pruning. arXiv:2607.05061v1"
)
CONTEXT = 16384
"""Tokens that the paper's compression ratios refer to: 4096 slots are CR = 75 %, 2048 are 88 % (87.5 %)."""
ROLLOUTS = 16
"""Per prompt, in Table 1."""

Row = tuple[str, float, tuple[float, ...]]
"""Variant, compression ratio (0: the dense teacher), figures by column."""


@dataclass(frozen=True)
class PaperTable:
    """``columns`` are tasks by name and the titles they have in a table; where there is an ``average``, the last two figures of
    a row are the average over tasks and that relative to the teacher's."""

    number: int
    title: str
    columns: dict[str, str]
    average: bool
    models: dict[str, tuple[str, tuple[Row, ...]]]


VARIANTS = ("Teacher", "StreamLLM", "TOVA", "StreamLLM+", "DMS", "KVpop mlp", "KVpop")
RATIOS = (0.75, 0.875)

TABLE_1 = PaperTable(
    1,
    "Pass@1 on AIME and HMMT",
    {
        "aime-2024": "AIME 2024",
        "aime-2025": "AIME 2025",
        "hmmt-feb-2025": "HMMT 2502",
        "hmmt-nov-2025": "HMMT 2511",
    },
    True,
    {
        "Qwen3-4B-Instruct-2507": (
            "Qwen3 4B",
            (
                ("Teacher", 0.0, (0.61, 0.46, 0.30, 0.43, 0.45, 1.00)),
                ("StreamLLM", 0.75, (0.47, 0.33, 0.24, 0.33, 0.34, 0.76)),
                ("TOVA", 0.75, (0.56, 0.38, 0.28, 0.10, 0.33, 0.73)),
                ("StreamLLM+", 0.75, (0.55, 0.44, 0.30, 0.36, 0.41, 0.92)),
                ("DMS", 0.75, (0.62, 0.44, 0.28, 0.38, 0.43, 0.96)),
                ("KVpop mlp", 0.75, (0.62, 0.43, 0.29, 0.40, 0.44, 0.98)),
                ("KVpop", 0.75, (0.62, 0.44, 0.31, 0.39, 0.44, 0.98)),
                ("StreamLLM", 0.875, (0.30, 0.23, 0.15, 0.17, 0.21, 0.47)),
                ("TOVA", 0.875, (0.36, 0.23, 0.19, 0.28, 0.26, 0.58)),
                ("StreamLLM+", 0.875, (0.45, 0.33, 0.26, 0.29, 0.33, 0.74)),
                ("DMS", 0.875, (0.58, 0.41, 0.27, 0.35, 0.40, 0.89)),
                ("KVpop mlp", 0.875, (0.59, 0.44, 0.27, 0.38, 0.42, 0.93)),
                ("KVpop", 0.875, (0.61, 0.44, 0.30, 0.39, 0.44, 0.97)),
            ),
        ),
        "Qwen3-8B": (
            "Qwen3 8B",
            (
                ("Teacher", 0.0, (0.58, 0.49, 0.28, 0.37, 0.43, 1.00)),
                ("StreamLLM", 0.75, (0.13, 0.11, 0.03, 0.05, 0.08, 0.19)),
                ("TOVA", 0.75, (0.37, 0.23, 0.15, 0.28, 0.26, 0.60)),
                ("StreamLLM+", 0.75, (0.53, 0.41, 0.25, 0.35, 0.39, 0.91)),
                ("DMS", 0.75, (0.56, 0.45, 0.27, 0.35, 0.41, 0.95)),
                ("KVpop mlp", 0.75, (0.59, 0.46, 0.30, 0.38, 0.43, 1.00)),
                ("KVpop", 0.75, (0.57, 0.48, 0.31, 0.38, 0.44, 1.00)),
                ("StreamLLM", 0.875, (0.13, 0.11, 0.03, 0.05, 0.08, 0.19)),
                ("TOVA", 0.875, (0.08, 0.07, 0.09, 0.08, 0.08, 0.19)),
                ("StreamLLM+", 0.875, (0.42, 0.30, 0.18, 0.24, 0.29, 0.67)),
                ("DMS", 0.875, (0.52, 0.38, 0.22, 0.31, 0.36, 0.84)),
                ("KVpop mlp", 0.875, (0.57, 0.39, 0.31, 0.40, 0.42, 0.98)),
                ("KVpop", 0.875, (0.58, 0.44, 0.31, 0.39, 0.43, 1.00)),
            ),
        ),
    },
)

TABLE_2 = PaperTable(
    2,
    "GPQA-D and LCB",
    {"gpqa-diamond": "GPQA-D", "livecodebench-v6": "LCB"},
    False,
    {
        "Qwen3-4B-Instruct-2507": (
            "Qwen3 4B",
            (
                ("Teacher", 0.0, (0.59, 0.35)),
                ("StreamLLM", 0.75, (0.54, 0.36)),
                ("TOVA", 0.75, (0.58, 0.34)),
                ("StreamLLM+", 0.75, (0.55, 0.32)),
                ("DMS", 0.75, (0.55, 0.37)),
                ("KVpop mlp", 0.75, (0.59, 0.35)),
                ("KVpop", 0.75, (0.57, 0.33)),
                ("StreamLLM", 0.875, (0.49, 0.35)),
                ("TOVA", 0.875, (0.54, 0.35)),
                ("StreamLLM+", 0.875, (0.52, 0.29)),
                ("DMS", 0.875, (0.54, 0.35)),
                ("KVpop mlp", 0.875, (0.57, 0.35)),
                ("KVpop", 0.875, (0.56, 0.34)),
            ),
        )
    },
)

TABLES = (TABLE_1, TABLE_2)
