"""Graders: what counts as an answer, what is equal to what, and programs that would rather not be graded."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvpop.evals.grading import code as code_module
from kvpop.evals.grading import maths, sandbox
from kvpop.evals.grading.choice import last_choice
from kvpop.evals.grading.code import CodeGrader, Test, defines, last_code_block, same_output, same_value
from kvpop.evals.grading.inside import wire
from kvpop.evals.grading.killable import Pool, TimedOut
from kvpop.evals.grading.sandbox import Limits, Sandbox
from kvpop.evals.grading.text import final_part

Test.__test__ = False  # not a class of tests


# Boxes and integers


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (r"\boxed{5}", "5"),
        (r"first \boxed{3}, no: \boxed{5}.", "5"),
        (r"\boxed{a}\boxed{b}", "b"),
        (r"\boxed{\frac{1}{2}} and so on", r"\frac{1}{2}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{ \fbox{ \boxed{5} } }", "5"),
        (r"\fbox{7}", "7"),
        (r"\boxed{3} then \fbox{4}", "4"),
        (r"\boxed 7", "7"),
        (r"\boxed {12}", "12"),
        (r"\boxed{3} and \boxed{5", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{x \mid x > \tfrac{1}{2}\right\}}", r"\left\{x \mid x > \tfrac{1}{2}\right\}"),
        (r"\boxed{3 or \boxed{5}}", "3 or {5}"),
        (r"\boxed{}", ""),
        (r"\boxedx{3}", None),
        (r"\boxed", None),
        (r"\boxed{5", None),
        ("", None),
        ("the answer is 5", None),
    ],
)
def test_the_last_whole_box(text, held):
    assert maths.last_boxed(text) == held


@pytest.mark.parametrize(
    "text", [r"\boxed{" * 100_000, r"\boxed{" * 50_000 + "5" + "}" * 50_000, r"\boxed " * 100_000, "{" * 300_000]
)
def test_a_model_in_a_loop_takes_no_time_to_grade(text):
    start = time.monotonic()
    maths.last_boxed(text)
    last_choice(text + " the answer is" + " *" * 100_000)
    last_code_block(text + "\n```" * 10_000)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("73", 73), ("073", 73), ("000", 0), ("1,234", 1234), (r"1{,}234", 1234), (r"1\,234", 1234), ("73.", 73), ("73.0", 73),
        ("$73$", 73), (r"\(73\)", 73), (r"\text{73}", 73), (r"\mathbf{73}", 73), ("n = 73", 73), (r"73^\circ", 73), ("-5", -5),
        ("−5", -5), (r"\ 73\;", 73), ("{73}", 73),
        ("12,34", None), ("73.5", None), ("x = y = 3", None), ("73/1", None), ("٣", None), ("seventy", None), ("7e1", None),
        ("", None), ("9" * 100, None), ("73 or 74", None), (r"73\text{ cm}", None),
    ],
)  # fmt: skip
def test_integers(text, value):
    assert maths.integer(text) == value


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (r"so \boxed{073}", "right"),
        (r"\boxed{12} ... wait, \boxed{73}", "right"),
        (r"\boxed{73} ... wait, \boxed{12}", "wrong"),
        (r"\boxed{73\boxed{}}", "wrong"),
        (r"\boxed{1073}", "wrong"),
        (r"\boxed{-73}", "wrong"),
        (r"\boxed{\frac{146}{2}}", "wrong"),
        ("73", "no answer"),
        ("", "no answer"),
        (r"<think>\boxed{73}</think> I do not know.", "no answer"),
        (r"<think>\boxed{12}</think> It is \boxed{73}.", "right"),
        (r"<think> still thinking: \boxed{73}", "right"),
    ],
)
def test_integers_in_a_text(text, outcome):
    grade = maths.grade_integer(text, 73, 0, 999)
    assert grade.outcome == outcome
    assert grade.score == (outcome == "right")


def test_out_of_range_is_said():
    assert maths.grade_integer(r"\boxed{1073}", 73, 0, 999).note == "1073 lies outside [0, 999]"


# Expressions

EQUAL = [
    (r"\frac12", r"\frac{1}{2}"), ("0.5", r"\frac{1}{2}"), ("1/2", r"\frac{1}{2}"), (r"\dfrac{1}{2}", r"\tfrac{1}{2}"),
    (r"\frac{-1}{2}", r"-\frac12"), (r"1\frac{1}{2}", r"\frac{3}{2}"), (r"\frac{2}{4}", "0.5"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"), (r"2\sqrt3", r"\sqrt{12}"), (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"50\%", "50"), (r"50\%", r"\frac{1}{2}"), ("50%", "50"),
    (r"\{1,2\}", r"\{2,1\}"), (r"\left\{1, 2, 3\right\}", r"\{3,2,1\}"), (r"\emptyset", r"\{\}"), (r"\pm 2", r"\{2,-2\}"),
    ("1, 2", "2,1"), ("1 or 2", "1,2"),
    ("(1,2)", r"\left(1, 2\right)"), ("[1,2)", r"\left[1,2\right)"), (r"(-\infty,3]", r"(-\infty, 3]"),
    (r"[0,1]\cup[2,3]", r"[2,3]\cup[0,1]"), (r"x \in [1,2]", "[1,2]"),
    (r"5\text{ cm}", "5"), ("5 cm", "5"), (r"12\,\mathrm{km/h}", "12"), (r"90^\circ", "90"), (r"\$18", "18"),
    (r"\$1,000.50", "1000.5"), ("1{,}000", "1000"), (r"5,\!000", "5000"),
    ("2^{10}", "1024"), ("10^{-3}", "0.001"), (r"\binom{5}{2}", "10"), ("5!", "120"), (r"\log_2 8", "3"),
    ("x^2+2x+1", "(x+1)^2"), ("x=5", "5"), ("y = 2x+3", "2x+3"), ("y=2x+3", "y = 3+2x"), ("3+2i", "2i+3"),
    (r"3\pi", r"\pi \cdot 3"), ("$-3$", "-3"), ("−3", "-3"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
    (r"\text{Monday}", "Monday"), (r"\text{(B)}", "B"),
]  # fmt: skip
DIFFERENT = [
    (r"\frac{a}{b}", r"\frac{b}{a}"), (r"\frac{1}{3}", "0.333"), ("3", "-3"), ("12", "1"), ("1", "12"), ("5", "5.1"),
    (r"\{1,2,3\}", r"\{2,1\}"), (r"\{1\}", r"\{1,2\}"), (r"\emptyset", r"\{0\}"),
    ("(1,2)", "(2,1)"), ("[1,2)", "[1,2]"), ("(1,2)", "[1,2]"), (r"[0,1]\cup[2,3]", "[0,3]"), (r"(-\infty,3)", r"(-\infty,3]"),
    (r"\pm 2", "2"), (r"17 \text{ or } 18", "17"), ("5 or 6", "5"), (r"\pi", "3.14"), (r"\infty", r"-\infty"), ("1/0", "5"),
    ("x^2+2x+2", "(x+1)^2"), (r"\sqrt{2}", "1.41"), (r"50\%", "0.05"), ("2x+3", "3x+2"),
    (r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\text{yes}", r"\text{no}"), ("apple", "pear"), (r"nonsense \foo{", "5"), ("}{", "5"), ("", "5"), (r"\frac{", "1"),
    ("the answer", "42"), ("?" * 3000, "42"), ("\x00", "5"), ("5\n6", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "gold"), EQUAL)
def test_equal_expressions(answer, gold):
    assert maths.equal(answer, gold) == "equal"
    assert maths.grade_expression(f"So it is \\boxed{{{answer}}}.", gold).outcome == "right"


@pytest.mark.parametrize(("answer", "gold"), DIFFERENT)
def test_different_expressions(answer, gold):
    assert maths.equal(answer, gold) == "different"


def test_expressions_in_a_text():
    right = maths.grade_expression(r"\boxed{3} no, \boxed{\frac{2}{4}}", r"\frac12")
    assert (right.outcome, right.score, right.answer) == ("right", 1.0, r"\frac{2}{4}")
    assert maths.grade_expression(r"\boxed{3}", r"\frac12").outcome == "wrong"
    assert maths.grade_expression("3", r"\frac12").outcome == "no answer"


def test_a_comparison_that_hangs_is_killed_and_the_next_one_works():
    maths.equal("x+1", "1+x")  # the worker is up
    start = time.monotonic()
    grade = maths.grade_expression(r"\boxed{99999999!}", "5", seconds=0.5)
    assert grade.outcome == "timeout"
    assert grade.note == "comparing it took more than 0.5 s"
    assert time.monotonic() - start < 3
    assert maths.equal("x+2", "2+x") == "equal"


def test_plain_equality_needs_no_package(monkeypatch):
    monkeypatch.setattr(maths, "find_spec", lambda name: None)
    assert maths.equal(r"\dfrac{1}{2}", r" \frac{1}{2}. ") == "equal"
    assert maths.equal("007", "8") == "different"
    with pytest.raises(ImportError, match=r"needs math-verify: pip install 'kvpop\[evals\]'"):
        maths.equal("0.5", r"\frac{1}{2}")


@pytest.mark.parametrize("name", ["math_verify", "reasoning_gym"])
def test_the_packages_of_the_extras_do_not_need_torch(name):
    pytest.importorskip(name)
    code = f"import {name}, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


SCRIPT = """
import json, os, sys, time
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request.get("sleep"):
        time.sleep(request["sleep"])
    if request.get("die"):
        os._exit(3)
    print(json.dumps(os.getpid()), flush=True)
"""


@pytest.fixture
def pool(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)
    pool = Pool(str(script), workers=2)
    yield pool
    pool.close()


def test_a_pool_reuses_workers_and_replaces_those_that_fail(pool):
    first = pool.ask({}, 5)
    assert pool.ask({}, 5) == first
    with pytest.raises(TimedOut, match="took too long"):
        pool.ask({"sleep": 60}, 0.2)
    second = pool.ask({}, 5)
    assert second != first
    assert not Path(f"/proc/{first}").exists()
    with pytest.raises(TimedOut, match="ended"):
        pool.ask({"die": 1}, 5)
    third = pool.ask({}, 5)
    pool.close()
    assert not Path(f"/proc/{third}").exists()
    assert pool.ask({}, 5) not in (first, second, third)


def test_a_pool_serves_threads(pool):
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda i: pool.ask({"sleep": 0.02}, 20), range(30)))
    assert 1 <= len(set(answers)) <= 2


def _equal_in_a_process(pair):
    return maths.equal(*pair)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_expressions_are_compared_in_processes_of_either_kind(method):
    assert maths.equal("x+1", "1+x") == "equal"  # a pool that a fork must not take over
    with multiprocessing.get_context(method).Pool(1) as processes:
        pairs = [("x+1", "1+x"), ("x+1", "x+2")]
        assert processes.map_async(_equal_in_a_process, pairs).get(60) == ["equal", "different"]


def test_nothing_hangs_at_exit_and_no_worker_stays(tmp_path):
    code = (
        "from kvpop.evals.grading import maths\n"
        "print(maths.equal('x+1', '1+x'))\n"
        "print([worker.process.pid for worker in maths.pool()._all][0], flush=True)\n"
    )
    for end in ("", "import os; os._exit(0)"):
        done = subprocess.run([sys.executable, "-c", code + end], capture_output=True, text=True, timeout=60)
        verdict, pid = done.stdout.split()
        assert verdict == "equal"
        until = time.monotonic() + 5
        while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert not Path(f"/proc/{pid}").exists()


# Multiple choice


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: C", "C"), ("**Answer:** C", "C"), ("**Answer: (C)**", "C"), ("The answer is (C).", "C"), ("answer is C", "C"),
        (r"\boxed{C}", "C"), (r"\boxed{\text{C}}", "C"), (r"\boxed{(C)}", "C"), (r"\boxed{C) 5 m}", "C"),
        (r"$\boxed{\mathrm{C}}$", "C"), (r"\boxed{\textbf{(C)}}", "C"), ("The correct option is B.", "B"),
        ("The correct answer is option D", "D"), ("So it must be\n\nC", "C"), ("...\n(B)", "B"), ("...\n**D**", "D"),
        ("C.", "C"),
        ("Answer: A. No, wait. Answer: B", "B"), (r"\boxed{A} hmm, the answer is D.", "D"),
        (r"The answer is A. \boxed{B}", "B"),
        ("<think>Answer: A</think>Answer: B", "B"), ("The answer is A because it is", "A"), ("Answer: $C$", "C"),
        ("<think>Answer: A</think>no idea", None), ("The answer is A or B", None), (r"\boxed{A, B}", None),
        ("Answer: A/B", None),
        ("The answer is a matter of taste", None), ("The answer is A good deal more", None), ("The answer is not C", None),
        ("Answer: E", None), (r"\boxed{42}", None), (r"Answer: A, so \boxed{42}", None), ("Consider option (B) first", None),
        ("Carbon", None), ("", None), ("The answer is Dubious", None), ("A, B, C and D are all plausible", None),
        ("Answer: C'est la vie", None),
    ],
)  # fmt: skip
def test_choices(text, letter):
    assert last_choice(text) == letter


# Code: finding it, comparing what comes out


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\nand\n```py\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("````python\n```\na\n````", "```\na\n"),
        ("```python\na\n```\nIn C++:\n```cpp\nb\n```", "a\n"),
        ("```python\na", "a"),
        ("```python\na\n```\n```python\n```", "a\n"),
        ("<think>```python\na\n```</think> nothing", None),
        ("```cpp\na\n```", None),
        ("no code", None),
        ("", None),
    ],
)
def test_the_last_block_of_python(text, code):
    assert last_code_block(text) == code


def test_definitions_are_found_by_their_lines():
    assert defines("import os\ndef f(x):\n    pass", "f")
    assert defines("f = lambda x: x", "f")
    assert not defines("    def f(x):\n        pass", "f")
    assert not defines("def ff(x): pass", "f")
    assert final_part("a</think>b</think>c") == "c"


def test_outputs_and_values_are_compared():
    assert same_output("1\n2  \n\n", "1\n2")
    assert same_output("0.50 yes", "0.5 yes")
    assert same_output("1e2", "100")
    assert same_output("", "\n")
    assert not same_output("1\n2", "1 2")
    assert not same_output("1\n\n2", "1\n2")
    assert not same_output("0.5000001", "0.5")
    assert not same_output("nan", "0")
    assert not same_output("Yes", "yes")
    assert not same_output("1_0", "10")
    assert same_value((1, [2, (3,)]), [1, [2, [3]]])
    assert same_value({"a": (1,)}, {"a": [1]})
    assert not same_value([1], [1, 2])
    assert not same_value("1", 1)
    assert not same_value(None, [])


def test_data_travels_as_it_is_and_objects_do_not():
    held = {1: (2.5, None, True), (1, 2): {3, 4}, "a": [frozenset({1}), b"x", 1 + 2j, float("inf")]}
    assert wire.unpack(wire.pack(held)) == held
    assert type(wire.unpack(wire.pack(True))) is bool

    class Agreeable(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    back = wire.unpack(wire.pack(Agreeable(7)))
    assert type(back) is int
    assert back != 8
    with pytest.raises(TypeError, match="object is no plain data"):
        wire.pack(object())
    deep: list = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ValueError, match="deeper than 50"):
        wire.pack(deep)


# Code: running it

ISOLATION, REASON = sandbox.pick()
needs_isolation = pytest.mark.skipif(ISOLATION is None, reason=REASON)
FAST = Limits(seconds=8.0, memory=512, processes=8, disk=4, output=1 << 20)
SHORT = Limits(seconds=1.0, memory=512, processes=8, disk=4, output=1 << 20)

PROMPT = 'def add(a, b):\n    """Sum of both."""\n'
CHECK = (
    "def check(candidate):\n"
    "    assert candidate(1, 2) == 3\n"
    "    assert candidate((1,), (2,)) == (1, 2)\n"
    "    assert abs(candidate(0.5, 0.25) - 0.75) < 1e-9\n"
)
ADD = "def add(a, b):\n    return a + b\n"
STDIN = [Test("3\n4\n", "7\n"), Test("1\n2\n", "3")]
CALLS = [Test([[1, 2], 3], [1, 2, 3]), Test([[], 3], [3])]


def test_nothing_runs_unless_it_is_allowed(monkeypatch):
    monkeypatch.setattr(code_module, "Sandbox", None)
    grader = CodeGrader()
    for grade in (
        grader.check(PROMPT, ADD, CHECK, "add"),
        grader.stdin_tests("1", STDIN),
        grader.function_tests("1", "f", CALLS),
    ):
        assert (grade.outcome, grade.score) == ("refused", 0.0)
        assert "not allowed (allow_code)" in grade.note


def test_nothing_runs_without_isolation(monkeypatch):
    monkeypatch.setattr(sandbox, "works", lambda isolation: "no")
    grade = CodeGrader(allow_code=True).stdin_tests("1", STDIN)
    assert grade.outcome == "refused"
    assert grade.note.startswith("no isolation works here: ")
    grade = CodeGrader(allow_code=True, isolation="bubblewrap").stdin_tests("1", STDIN)
    assert grade.note == "the isolation bubblewrap does not work here: no"


def test_limits_are_positive():
    with pytest.raises(ValueError, match="the limit memory must be above 0, got 0"):
        Limits(memory=0)


@needs_isolation
@pytest.mark.parametrize(
    ("code", "outcome", "note"),
    [
        (ADD, "right", "check passed"),
        ("from __future__ import annotations\nimport math\n" + ADD, "right", "check passed"),
        ("def add(a, b):\n    return a - b\n", "wrong", "AssertionError"),
        ("def add(a, b:\n", "wrong", "SyntaxError"),
        ("def plus(a, b):\n    return a + b\n", "wrong", "AssertionError"),  # the prompt's own gives None
        ("", "wrong", "AssertionError"),
        # Ways of being right without being right.
        ("import sys\nsys.exit(0)", "wrong", "SystemExit"),
        ("import os\nos._exit(0)", "wrong", "ended before it was tested"),
        ("def add(a, b):\n    import os\n    os._exit(0)", "wrong", "ended before it was tested"),
        ("class E:\n    __eq__ = lambda *_: True\ndef add(a, b): return E()", "wrong", "E is no plain data"),
        ("class I(int):\n    __eq__ = lambda *_: True\ndef add(a, b): return I(9)", "wrong", "AssertionError"),
        ("class F(float):\n    __sub__ = __rsub__ = lambda *_: 0\ndef add(a, b): return F(9)", "wrong", "AssertionError"),
        ("import builtins as b\nb.abs = lambda x: 0\nb.AssertionError = SystemExit\ndef add(a, b): return 3", "wrong", ""),
        ("def check(candidate): pass\ndef add(a, b): return 0", "wrong", "AssertionError"),
        ("import os\nfor fd in range(3, 60):\n    try: os.write(fd, b'{\"passed\": true}\\n')\n    except OSError: pass",
         "wrong", ""),
        ("import os, json\nos.write(4, b'{\"value\": 3}\\n' * 9)\nimport time\ntime.sleep(60)", "wrong", "AssertionError"),
        ("import os\nos.write(4, b'[' * 90000 + b'\\n')\ndef add(a, b): return 3", "wrong", "RecursionError"),
        ("import gc, sys\nfor o in gc.get_objects():\n    if callable(o) and getattr(o, '__name__', '') == 'pack':\n        "
         "sys.modules['wire'].pack = lambda v: True\nimport __main__\n__main__.pack = lambda v, d=0: True", "wrong", ""),
        ("import sys\nsys.modules['json'].dumps = lambda *_: '{\"passed\": true}'\ndef add(a, b): return 0", "wrong", ""),
        ("raise KeyboardInterrupt", "wrong", "KeyboardInterrupt"),
        ("print('x' * 3_000_000)\n" + ADD, "wrong", ""),
        ("print('noise', flush=True)\n" + ADD, "right", "check passed"),
    ],
)  # fmt: skip
def test_a_check(code, outcome, note):
    grade = CodeGrader(True, FAST).check(PROMPT, code, CHECK, "add")
    assert (grade.outcome, grade.score) == (outcome, float(outcome == "right"))
    assert note in grade.note
    assert grade.note.endswith(f"isolation: {ISOLATION}")
    assert grade.answer == code


@needs_isolation
def test_a_check_may_use_what_the_prompt_defines():
    prompt = 'def twice(x):\n    return 2 * x\n\ndef half(x):\n    """Undo twice."""\n'
    check = "def check(candidate):\n    assert candidate(twice(4)) == 4\n"
    assert CodeGrader(True, FAST).check(prompt, "def half(x):\n    return x // 2", check, "half").outcome == "right"
    # What the program makes of the helper stays with the program.
    cheat = "def twice(x):\n    return x\ndef half(x):\n    return x"
    assert CodeGrader(True, FAST).check(prompt, cheat, check, "half").outcome == "wrong"


@needs_isolation
@pytest.mark.parametrize(
    ("code", "outcome", "note"),
    [
        ("print(int(input()) + int(input()))", "right", "2 tests"),
        ("print('%.2f' % (int(input()) + int(input())))", "right", "2 tests"),
        ("import sys\nprint(sum(map(int, open(0).read().split())))", "right", "2 tests"),
        ("def main():\n    print(sum(int(input()) for _ in range(2)))\nif __name__ == '__main__':\n    main()", "right", ""),
        ("import threading\nthreading.stack_size(1 << 26)\n"
         "t = threading.Thread(target=lambda: print(int(input()) + int(input())))\nt.start(); t.join()", "right", ""),
        ("print(7)", "wrong", "test 2 of 2: another output"),
        ("import os\nprint(7, flush=True)\nos._exit(0)", "wrong", "test 2 of 2"),
        ("print(int(input()) + int(input()))\nexit(1)", "wrong", "ended with exit code 1"),
        ("print(int(input()) + int(input()), flush=True)\nimport os, signal\nos.kill(os.getpid(), 9)", "wrong", "SIGKILL"),
        ("input(); input(); input()", "wrong", "exit code 1"),
        ("print('expected output')", "wrong", "another output"),
        ("import os, signal\nfor pid in (os.getppid(), 1):\n    for n in (2, 9, 15):\n        try: os.kill(pid, n)\n"
         "        except OSError: pass\nprint(7)", "wrong", "test"),
    ],
)  # fmt: skip
def test_scripts(code, outcome, note):
    grade = CodeGrader(True, FAST).stdin_tests(code, STDIN)
    assert (grade.outcome, grade.score) == (outcome, float(outcome == "right"))
    assert note in grade.note


@needs_isolation
@pytest.mark.parametrize(
    ("code", "outcome", "note"),
    [
        (
            "class Solution:\n    def f(self, a: List[int], b: int) -> List[int]:\n        return a + [b]",
            "right",
            "2 tests",
        ),
        ("class Solution:\n    def f(self, a, b):\n        return (*a, b)", "right", "2 tests"),
        ("class Solution:\n    def f(self, a, b):\n        return [1, 2, 3]", "wrong", "test 2 of 2: another value"),
        ("class Solution:\n    def g(self, a, b):\n        return a + [b]", "wrong", "AttributeError"),
        ("import os\nos._exit(0)", "wrong", "loading it: the program ended"),
        ('import os\nos.write(4, b\'{"value": null}\\n{"value": [1]}\\n\')\nos._exit(0)', "wrong", "test 1 of 2: "),
        ("import os\nos.write(4, b'\\xff\\n')", "wrong", "no data"),
        ('import os\nos.write(4, b\'{"value": {"set": [{"list": []}]}}\\n\')', "wrong", "no data"),
        ("import os\nos.write(4, b'[' * 90000 + b'\\n')", "wrong", "no data"),
        ("import os\nos.write(4, b'{\"value\": ' + b'9' * 60000 + b'}\\n')", "wrong", "no data"),
    ],
)
def test_functions(code, outcome, note):
    grade = CodeGrader(True, FAST).function_tests(code, "Solution.f", CALLS)
    assert (grade.outcome, grade.score) == (outcome, float(outcome == "right"))
    assert note in grade.note


@needs_isolation
def test_a_program_that_does_not_listen_holds_nobody_up():
    """It says it is ready and never reads: the request is larger than a pipe."""
    code = "import os, time\nos.write(4, b'{\"value\": null}\\n')\ntime.sleep(60)"
    start = time.monotonic()
    grade = CodeGrader(True, SHORT).function_tests(code, "f", [Test([[0] * 200_000], 0)])
    assert grade.outcome == "timeout"
    assert time.monotonic() - start < 6


@needs_isolation
def test_programs_run_side_by_side():
    grader = CodeGrader(True, FAST)
    codes = [ADD, "def add(a, b):\n    return 0"] * 3
    with ThreadPoolExecutor(3) as threads:
        grades = list(threads.map(lambda code: grader.check(PROMPT, code, CHECK, "add"), codes))
    assert [grade.outcome for grade in grades] == ["right", "wrong"] * 3


# Code: programs that run away or attack


def namespace_is_empty(name: str) -> bool:
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if os.readlink(process / "ns/pid") == name:
                    return False
            except OSError:
                pass
    return True


def contain(program: str, limits: Limits = SHORT, stdin: bytes = b"") -> sandbox.Ended:
    """Run it; in the end, no process and no file of it is left, and all that took seconds."""
    marked = f"import os\nprint(os.readlink('/proc/self/ns/pid'), flush=True)\n{program}"
    start = time.monotonic()
    with Sandbox({"main.py": marked}, ["main.py"], limits, ISOLATION, stdin=stdin) as box:
        ended = box.result()
    assert time.monotonic() - start < limits.seconds + 4
    assert not os.path.exists(box.directory)
    name, _, rest = ended.stdout.decode("utf-8", "replace").partition("\n")
    assert name.startswith("pid:["), ended
    assert name != os.readlink("/proc/self/ns/pid")
    assert namespace_is_empty(name)
    return sandbox.Ended(ended.why, ended.code, rest.encode())


@needs_isolation
@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("while True: pass", "timeout"),
        ("import time\ntime.sleep(600)", "timeout"),
        ("import signal, time\nfor n in {*range(1, 65)} - {9, 19, 32, 33}: signal.signal(n, signal.SIG_IGN)\n"
         "while True: time.sleep(1)", "timeout"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout"),
        ("import os, time\nos.close(0); os.close(1); os.close(2)\ntime.sleep(600)", "timeout"),
        ("while True: print('x' * 10_000)", "output"),
        ("import os\nwhile True: os.write(2, b'x' * 10_000)", "timeout"),  # nobody reads it
        ("held = []\nwhile True: held.append(bytearray(10_000_000))", "exit timeout"),
        ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", "timeout exit signal"),  # as memory and time have it
        ("import ctypes\nctypes.string_at(0)", "signal"),
        ("import os\nos.abort()", "signal"),
        ("raise SystemExit('no')", "exit"),
        ("x = 10 ** 10 ** 10", "timeout"),
        ("import time\nfor pid in (1, os.getppid(), -1):\n    for n in range(1, 65):\n"
         "        try: os.kill(pid, n)\n        except OSError: pass\ntime.sleep(600)", "timeout signal error"),
        ("import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')", "timeout"),
    ],
)  # fmt: skip
def test_runaway_programs_are_ended(program, why):
    ended = contain(program)
    assert ended.why in why.split()
    assert (ended.why, ended.code) != ("exit", 0)


@needs_isolation
def test_there_is_a_limit_on_processes():
    count = contain(
        "import time\nn = 0\n"
        "try:\n    while n < 200:\n        if os.fork() == 0:\n            time.sleep(60); os._exit(0)\n        n += 1\n"
        "except OSError:\n    pass\nprint(n)"
    ).stdout
    assert 0 < int(count) < 20


@needs_isolation
def test_what_a_program_leaves_behind_ends_with_it():
    ended = contain(
        "import signal, time\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n        os.setsid()\n        if os.fork(): os._exit(0)\n"
        "        for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
        "        os.close(1); os.close(0); os.close(2)\n        time.sleep(600)\n"
        "print('parent is done')"
    )
    assert (ended.why, ended.code, ended.stdout) == ("exit", 0, b"parent is done\n")


@needs_isolation
def test_files_are_limited():
    ended = contain(
        "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nwritten = 0\n"
        "try:\n    for i in range(100):\n        with open(f'f{i}', 'wb') as f:\n            for _ in range(3):\n"
        "                written += f.write(b'x' * 1_000_000); f.flush()\n"
        "except OSError:\n    pass\nprint(written)\n"
        "held = []\ntry:\n    while True: held.append(open('/dev/null'))\nexcept OSError:\n    print(len(held))"
    )
    written, opened = map(int, ended.stdout.split())
    assert 0 < written <= FAST.disk << 20
    assert 0 < opened < 64


@needs_isolation
def test_nothing_outside_is_written_or_read(tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    monkeypatch.setenv("KVPOP_TEST_TOKEN", "hidden")
    targets = [str(tmp_path / "new"), str(secret), "/usr/new", "/etc/new", "/new", "/dev/new", str(Path.home() / "kvpop-new"),
               str(Path(sys.prefix) / "kvpop-new"), str(Path(importlib.util.__file__))]  # fmt: skip
    ended = contain(
        f"for path in {targets!r}:\n"
        "    try:\n        open(path, 'a').write('x')\n        print('wrote', path)\n    except OSError: pass\n"
        f"for path in ({str(secret)!r}, '/etc/passwd', '/etc/shadow', '/proc/1/environ', '/root/.ssh'):\n"
        "    try:\n        print(open(path).read())\n    except OSError: pass\n"
        "print({k for k in os.environ if k not in ('PATH', 'HOME', 'TMPDIR', 'LANG')})\n"
        "print(os.listdir(os.environ['HOME']), os.listdir('.'), os.getuid() == 0)\n"
        "try:\n    os.remount = os.mkdir('/x')\nexcept OSError as error:\n    print('read-only')\n"
    ).stdout.decode()
    assert "wrote" not in ended
    assert "hidden" not in ended
    assert "root:" not in ended
    assert "['main.py'] ['main.py']" in ended
    assert "read-only" in ended
    assert secret.read_text() == "hidden"
    assert not any(os.path.exists(path) for path in targets if "new" in path)


@needs_isolation
def test_there_is_no_network():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        ended = contain(
            "import socket\n"
            f"for address in (('127.0.0.1', {port}), ('8.8.8.8', 53), ('::1', {port})):\n"
            "    try:\n        socket.create_connection(address, timeout=0.5)\n        print('connected')\n"
            "    except OSError:\n        print('refused')\n"
            "print(len(socket.if_nameindex()))"
        ).stdout.decode()
        assert ended == "refused\nrefused\nrefused\n1\n"
        with pytest.raises(TimeoutError):
            server.accept()


@needs_isolation
def test_rights_cannot_be_won_back():
    ended = contain(
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "print(libc.unshare(0x10000000), libc.mount(b'none', b'/box', b'tmpfs', 0, None), libc.chroot(b'/usr'))\n"
        "print(libc.setuid(0) if os.getuid() else -1)\n"
        "status = open('/proc/self/status').read()\n"
        "print([line.split()[1] for line in status.splitlines() if line.startswith(('CapEff', 'CapPrm', 'NoNewPrivs'))])\n"
        "try:\n    os.kill(1, 9)\nexcept OSError:\n    pass\nprint(sorted(p for p in os.listdir('/proc') if p.isdigit()))\n"
    ).stdout.decode()
    lines = ended.splitlines()
    assert lines[0] == "-1 -1 -1"
    assert lines[1] == "-1"
    assert lines[2] == "['0000000000000000', '0000000000000000', '1']"
    assert lines[3].startswith("['1', '2'")


@needs_isolation
def test_a_large_input_that_nobody_reads_holds_nothing_up():
    assert contain("print('done')", stdin=b"x" * 5_000_000).stdout == b"done\n"
    assert contain("print(len(open(0).read()))", FAST, stdin=b"x" * 5_000_000).stdout == b"5000000\n"


@needs_isolation
def test_the_end_of_the_caller_is_the_end_of_the_program():
    code = (
        "import os, sys\nfrom kvpop.evals.grading.sandbox import Limits, Sandbox\n"
        "box = Sandbox({'main.py': \"import os, time; print(os.readlink('/proc/self/ns/pid'), flush=True); time.sleep(600)\"},"
        f" ['main.py'], Limits(seconds=60), {ISOLATION!r})\n"
        "print(box.process.stdout.readline().decode(), box.directory, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    name, directory = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    ).stdout.split()
    until = time.monotonic() + 5
    while not namespace_is_empty(name) and time.monotonic() < until:
        time.sleep(0.05)
    assert namespace_is_empty(name)
    os.rmdir(directory)  # an empty directory is all that a caller who is killed leaves


SYSTEM_PYTHON = "/usr/bin/python3"


def test_limits_alone_still_refuse_what_matters(tmp_path, monkeypatch):
    """As in most containers: no namespaces. Root's program runs as nobody, who must be able to read the interpreter."""
    if os.geteuid() == 0 and sandbox.works("limits"):
        if not os.path.exists(SYSTEM_PYTHON):
            pytest.skip(f"nobody may not run {sys.executable}, and there is no {SYSTEM_PYTHON}")
        monkeypatch.setattr(sys, "executable", SYSTEM_PYTHON)
    program = (
        "import os, socket, subprocess, threading\n"
        "def attempt(name, call):\n"
        "    try: call(); print(name)\n"
        "    except (OSError, RuntimeError): pass\n"
        "attempt('socket', socket.socket)\n"
        "attempt('fork', os.fork)\n"
        "attempt('run', lambda: subprocess.run(['true']))\n"
        "attempt('kill', lambda: os.kill(os.getppid(), 9))\n"
        "attempt('session', os.setsid)\n"
        "attempt('thread', lambda: threading.Thread(target=print, args=('in a thread',)).start())\n"
        "open('file', 'w').write('x')\n"
        "print(sorted(os.listdir('.')), 'HOME' in os.environ, 'KVPOP_TEST_TOKEN' in os.environ)\n"
    )
    monkeypatch.setenv("KVPOP_TEST_TOKEN", "hidden")
    with Sandbox({"main.py": program}, ["main.py"], FAST, "limits") as box:
        ended = box.result()
    assert (ended.why, ended.code) == ("exit", 0), ended
    assert ended.stdout.decode().split("\n") == ["in a thread", "thread", "['file', 'main.py'] True False", ""]
    assert not os.path.exists(box.directory)
    for runaway, why in (("while True: pass", "timeout"), ("while True: print('x' * 10_000)", "output")):
        with Sandbox({"main.py": runaway}, ["main.py"], SHORT, "limits") as box:
            assert box.result().why == why


@pytest.mark.skipif(sandbox.works("bubblewrap") != "", reason=f"bubblewrap: {sandbox.works('bubblewrap')}")
def test_bubblewrap_contains_as_well():
    grader = CodeGrader(True, FAST, isolation="bubblewrap")
    assert grader.check(PROMPT, ADD, CHECK, "add").note == "check passed; isolation: bubblewrap"
    assert grader.check(PROMPT, "import os\nos._exit(0)", CHECK, "add").outcome == "wrong"
    assert grader.stdin_tests("while True: pass", STDIN[:1]).outcome == "timeout"
    assert grader.stdin_tests("import socket\nsocket.create_connection(('8.8.8.8', 53), 1)", STDIN).outcome == "wrong"
    assert grader.stdin_tests(f"open({str(Path.home())!r} + '/kvpop-new', 'w')", STDIN).outcome == "wrong"
    assert not (Path.home() / "kvpop-new").exists()


def test_a_sandbox_that_fails_is_no_wrong_answer():
    """A machine without room is not the model's fault."""
    grader = CodeGrader(True, Limits(disk=1), isolation=ISOLATION)
    if ISOLATION is None:
        pytest.skip(REASON)
    with pytest.raises(OSError, match="a sandbox failed"):
        grader.check(PROMPT, ADD, "#" * (2 << 20) + "\n" + CHECK, "add")
    assert (
        grader.check(PROMPT, "#" * (2 << 20), CHECK, "add").note == "the code has 2097152 characters, more than 1048576"
    )
