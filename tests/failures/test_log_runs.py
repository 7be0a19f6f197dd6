"""A log with several runs of a job: the last one is what is asked about."""

from __future__ import annotations

import pytest

from ddpdoctor.failures.log import read
from ddpdoctor.failures.verdict import findings
from tests.support.log_lines import BANNER, CANCELLED, FAILED, STEPS, SUMMARY, one, timeouts

LEAVES = (
    "1: W0403 16:15:06.176000 53 torch/distributed/elastic/rendezvous/dynamic_rendezvous.py:1331] "
    "The node 'n_5389_0' has failed to {} '13' due to an error of type {}.\n"
)


def test_of_several_runs_the_last_one_counts() -> None:
    text = BANNER + FAILED.format("first") + BANNER + STEPS + FAILED.format("second")
    found = one(text)
    assert found.message == "rank 1 raised ValueError: second"
    before = [each for each in found.evidence if each.startswith("before: in an earlier run")]
    assert len(before) == 1 and "ValueError: first" in before[0]


def test_a_failure_of_an_earlier_run_is_no_cause_of_the_last_ones() -> None:
    alike = timeouts(r0=(4, "ALLREDUCE", 64), r1=(4, "ALLREDUCE", 64))
    found = one(BANNER + FAILED.format("first") + BANNER + STEPS + alike)
    assert found.code == "DDP907"
    assert found.message.endswith("in ALLREDUCE #4, which did not complete")


def test_a_last_run_that_went_well_leaves_an_info() -> None:
    found = one(BANNER + FAILED.format("first") + BANNER + STEPS + "training is done\n")
    assert found.severity.label == "info"
    assert found.message.startswith("in an earlier run, which ends at job.log:")
    assert found.message.endswith("; the last run begins at line 7")


@pytest.mark.parametrize(("lines", "severity"), [(120, "info"), (4, "error")])
def test_what_goes_on_long_after_the_launchers_report_is_a_later_run(
    lines: int, severity: str
) -> None:
    """A script that starts without a launcher's banner, appended to the log of the run before."""
    found = one(FAILED.format("first") + "step 7 loss 0.5\n" * lines)
    assert found.severity.label == severity
    assert "raised ValueError: first" in found.message


def test_an_agent_that_leaves_after_the_first_node_is_no_failure() -> None:
    found = one(
        STEPS
        + LEAVES.format("send a keep-alive heartbeat to the rendezvous", "RendezvousTimeoutError")
        + LEAVES.format("shutdown the rendezvous", "RendezvousConnectionError")
    )
    assert found.severity.label == "info"
    assert found.message == (
        "a process of task 1 lost the job's store, which ends with rank 0 or its torchrun, "
        "which is a warning; the log shows no failure"
    )
    assert one(FAILED.format("bad") + LEAVES.format("x", "y")).code == "DDP901"


def test_what_was_caught_is_no_end_of_a_run() -> None:
    caught = (
        "Traceback (most recent call last):\n  File \"/job/a.py\", line 5, in a\nKeyError: 'x'\n"
    )
    log = FAILED.format("first") + (STEPS + caught) * 20 + STEPS
    earlier, last = findings(read("job.log", [log.encode()]))
    assert earlier.message.endswith("; the last run begins at line 5")
    assert last.message.endswith("raised KeyError: 'x', and the log goes on after it")
    assert {earlier.severity.label, last.severity.label} == {"info"}


def test_steps_behind_a_launchers_end_are_of_a_later_run() -> None:
    found = one(FAILED.format("first") + SUMMARY.format(4711) + STEPS)
    assert found.severity.label == "info"
    assert found.message.endswith("; the last run begins at line 10")
    epilogue = "Job finished\nUsed 12 GB of memory\nCPU time was 3 h\nGoodbye\nSee you\n"
    assert one(FAILED.format("first") + SUMMARY.format(4711) + epilogue).severity.label == "error"


def test_a_rank_that_is_another_process_is_of_another_run() -> None:
    found = one(
        FAILED.format("first")
        + SUMMARY.format(4711)
        + FAILED.format("second")
        + SUMMARY.format(4712)
    )
    assert found.message == "rank 1 raised ValueError: second"
    assert "rank 1 raised ValueError: first" in found.evidence[-1]


def test_a_banner_that_comes_out_last_begins_no_run() -> None:
    """``torch.distributed.launch`` prints it into a buffer, which is written at its end."""
    stopped = "Killing subprocess 4711\nKilling subprocess 4712\n"
    found = one(FAILED.format("bad") + BANNER + stopped)
    assert found.message == "rank 1 raised ValueError: bad"
    assert not any("earlier run" in each for each in found.evidence)


def test_steps_behind_a_ctrl_c_are_of_a_later_run() -> None:
    interrupted = (
        'Traceback (most recent call last):\n  File "/job/a.py", line 5, in <module>\n'
        "KeyboardInterrupt\n"
    )
    found = one(
        START + interrupted + START + STEPS + "run.sh: line 41: 86744 Terminated      python a.py\n"
    )
    assert "was asked to stop" in found.message
    assert "was interrupted (Ctrl-C)" in found.evidence[-1]


def test_another_slurm_job_is_another_run() -> None:
    ended = "slurmstepd: error: *** JOB {} ON node3 CANCELLED AT 2024-05-01T12:00:00 ***\n"
    found = one(STEPS + ended.format(4711) + STEPS + ended.format(4712))
    assert found.evidence[0].startswith("job.log:18: ")
    assert found.evidence[1].endswith("; the last run begins at line 10")


def test_the_launchers_of_several_nodes_are_of_one_run() -> None:
    found = one(BANNER + BANNER + FAILED.format("first"))
    assert found.message == "rank 1 raised ValueError: first"
    assert not any("earlier run" in each for each in found.evidence)


def raised(message: str, line: int = 5) -> str:
    """What Python prints of an exception that ends a script."""
    return (
        f'Traceback (most recent call last):\n  File "/job/a.py", line {line}, in <module>\n'
        f"    main()\n{message}\n"
    )


START = "loading the images of the data set\nthe model has 12 layers\n"
BUFFER = 16_384
"""Bytes that Python's stdout holds back until its process ends."""


def test_steps_behind_another_start_are_of_a_later_run() -> None:
    """Also without a banner, and few of them: as a script alone writes them into nohup.out."""
    found = one(START + raised("ValueError: no such option") + START + STEPS)
    assert found.severity.label == "info"
    assert found.message.startswith("in an earlier run, which ends at job.log:6, ")
    assert not any("do not say whose" in each for each in found.evidence)


@pytest.mark.parametrize("message", ["ValueError: bad", "KeyboardInterrupt"])
def test_what_stdout_held_back_is_of_no_later_run(message: str) -> None:
    """It is written where the process ends, behind the exception on stderr."""
    held_back = "".join(f"frame {number:06}\n" for number in range(900))
    assert len(held_back) < BUFFER
    assert one(START + STEPS + raised(message) + held_back).severity.label == "error"
    assert one(START + STEPS + raised(message) + held_back * 2).severity.label == "info"


def test_a_table_at_its_end_does_not_hide_that_a_later_run_went_well() -> None:
    table = "| class | AP |\n|:---|:---|\n" + "| person | 0.4 |\n" * 40
    bar = "  15%|#4        | 40939/273072 [10:17:10<47:35:57,  1.35it/s]\n"
    for end in (table, bar * 3):
        found = one(raised("ValueError: bad") + STEPS * 300 + "results:\n" + end)
        assert found.severity.label == "info"


def test_a_script_that_cannot_have_started_is_of_an_earlier_run() -> None:
    for broken in (
        raised("IndentationError: unindent does not match any outer indentation level"),
        "train.py: error: argument --workers: expected one argument\n",
    ):
        found = one(broken + raised("ValueError: bad", line=9))
        assert found.message == "a process of the job raised ValueError: bad"
        assert found.evidence[-1].startswith("before: in an earlier run, which ends at job.log:")
        # Each rank prints it.
        assert not any("earlier run" in each for each in one(broken * 2).evidence)


def test_a_launcher_that_prints_its_banner_last_starts_no_run_of_its_own() -> None:
    refused = "train.py: error: unrecognized arguments: 21\n"
    failed = raised(
        "subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 2."
    )
    killed = "Killing subprocess 4711\nKilling subprocess 4712\n"
    found = one(refused + failed + BANNER + killed + STEPS * 20)
    assert found.message.startswith("in an earlier run, which ends at job.log:9, ")
    assert "refused its options" in found.message


def test_a_log_that_begins_with_a_script_that_python_cannot_read() -> None:
    start = "[2025-04-23 21:28:26] [INFO] [accelerator.py:219] Setting ds_accelerator to cuda\n"
    unreadable = '  File "/job/utils.py", line 87\n    return data\n{}IndentationError: unindent\n'
    missing = (
        'Traceback (most recent call last):\n  File "/job/train.py", line 13, in <module>\n'
        "    config()\nValueError: You need to have PEFT library installed\n"
    )
    head = (
        'Traceback (most recent call last):\n  File "/job/train.py", line 1, in <module>\n'
        "    from utils import *\n"
    )
    found = one(head + unreadable.format("          ^\n") + start + missing + start + STEPS)
    assert found.severity.label == "info"
    assert "ValueError: You need to have PEFT" in found.message


def test_two_starts_that_fail_on_different_errors_are_two_runs() -> None:
    found = one(
        '  File "/job/train.py", line 71\n    data = a(b\n         ^\nSyntaxError: invalid syntax\n'
        'Traceback (most recent call last):\n  File "/job/train.py", line 3, in <module>\n'
        "    import data\nModuleNotFoundError: No module named 'data'\n"
    )
    assert found.message.endswith("raised ModuleNotFoundError: No module named 'data'")
    assert any("raised SyntaxError" in each for each in found.evidence)


def test_steps_that_are_indented_and_bars_are_work_of_the_next_run() -> None:
    start = ">>>>start training : forecast_step_a\ntrain 17645\nnext learning rate is 0.0005\n"
    ctrl_c = (
        'Traceback (most recent call last):\n  File "/job/train.py", line 13, in <module>\n'
        "    train()\nKeyboardInterrupt\n"
    )
    steps = "".join(f"\titers: {step}00, epoch: 1 | loss: 0.2\n" for step in range(8))
    bars = "".join(
        f"\r  0%|          | {step}/920 [00:14<3:45:21, 14.71s/it]" for step in range(400)
    )
    for work in (steps, bars + "\n"):
        assert one(start + work + ctrl_c + start + work).severity.label == "info"
        assert one(start + work + ctrl_c + work).severity.label == "error"


def test_what_comes_long_after_an_end_is_of_another_run() -> None:
    closing = "wandb: Synced 6 W&B file(s), 0 media file(s) and 0 other file(s)\n"
    found = one(STEPS + CANCELLED + "  _warn_prf(average, modifier)\n" * 1_100 + closing * 20)
    assert found.severity.label == "info"


def test_a_launching_script_that_failed_before_it_launched_was_of_another_run() -> None:
    failed = (
        'Traceback (most recent call last):\n  File "/job/go.py", line 4, in <module>\n'
        "    main()\nKeyError: 'WORLD_SIZE'\n"
    )
    launched = (
        'Traceback (most recent call last):\n  File "/job/go.py", line 4, in <module>\n'
        '    main()\n  File "/lib/python3.12/site-packages/deepspeed/launcher/runner.py", line 6, '
        "in main\n    result.wait()\nKeyboardInterrupt\n"
    )
    interrupted = (
        '[rank0]: Traceback (most recent call last):\n[rank0]:   File "/job/a.py", line 9\n'
    )
    interrupted += "[rank0]: KeyboardInterrupt\n"
    found, *others = findings(read("a.log", [(failed + interrupted + launched).encode()]))
    assert not others
    assert (found.code, found.ranks) == ("DDP908", (0,))
    assert any("in an earlier run, which ends at a.log:4" in each for each in found.evidence)
    # On another node it is of the same run.
    nodes = "".join(f"0: {line}\n" for line in failed.splitlines())
    nodes += "".join(f"1: {line}\n" for line in launched.splitlines())
    found = one(nodes)
    assert "a launcher that sets WORLD_SIZE" in found.message
    assert not any("earlier run" in each for each in found.evidence)


def test_options_that_many_ranks_refuse_are_one_run() -> None:
    usage = "".join(f"                       [--option-{number} N]\n" for number in range(400))
    refused = "train.py: error: unrecognized arguments: --keep-last 5"
    text = ""
    for task in range(3):
        for local in range(2):
            # One of them is torn.
            last = refused[:-2] if (task, local) == (1, 1) else refused
            said = f"usage: train.py [-h]\n{usage}{last}\n"
            text += "".join(f"{task}: [default{local}]:{line}\n" for line in said.splitlines())
    text += (
        "1: E0416 11:31:51.007000 14574 torch/distributed/elastic/multiprocessing/api.py:906] "
        "failed (exitcode: 2) local_rank: 0 (pid: 291890) of binary: /opt/venv/bin/python\n"
    )
    found = one(text)
    assert found.message.startswith("a process of task 0, local rank 0 refused its options")
    assert not any("earlier run" in each for each in found.evidence)


def test_stacks_that_ranks_print_at_the_time_limit_are_no_later_run() -> None:
    stack = "1: [default1]:Stack (most recent call first):\n" + "".join(
        f'1: [default1]:  File "/job/train.py", line {number} in step\n' for number in range(9)
    )
    limit = (
        "0: slurmstepd: error: *** STEP 7.1 ON nid7 CANCELLED AT 2026-04-15T11:31:51 DUE TO TIME "
        "LIMIT ***\n"
    )
    found = one(limit + stack * 30)
    assert found.severity.label == "error"
    assert "time limit is reached" in found.message


def test_bars_of_other_tasks_behind_the_end_of_one_are_of_its_run() -> None:
    raised = (
        'Traceback (most recent call last):\n  File "/job/a.py", line 9, in <module>\n    go()\n'
        "FileNotFoundError: gone\n"
    )
    text = "".join(f"0: [rank1]: {line}\n" for line in raised.splitlines())
    text += "srun: error: hades: task 0: Exited with exit code 1\n"
    bars = "\r".join(f"Map:  {n}%|##  | {n}000/39531 [00:09<00:04, 299 rows/s]" for n in range(9))
    assert one(text + f"1: {bars}\n").message == "rank 1 raised FileNotFoundError: gone"
    for own in ("0: ", "0: [default1]:"):
        assert one(f"{text}{own}{bars}\n").severity.label == "info"


@pytest.mark.parametrize(("year", "severity"), [(2023, "error"), (2025, "info")])
def test_what_was_written_before_an_end_is_no_later_run(year: int, severity: str) -> None:
    """Somebody put stderr before stdout."""
    steps = "".join(f"{year}-01-01 12:00:{second} [INFO] step\n" for second in range(10, 60))
    found = one(CANCELLED + steps * 3)
    assert (found.code, found.severity.label) == ("DDP908", severity)


def test_other_ranks_that_print_on_for_long_do_not_make_it_an_earlier_run() -> None:
    raised, ended = FAILED.format("bad batch").split("E1122", 1)
    on = "".join(f"[rank{n % 2 * 2}]: eval sample {n} decoded\n" for n in range(1500))
    steps = "".join(f"[rank{n % 3}]: step {n} loss 0.5\n" for n in range(300))
    found = one(f"{steps}{raised}{on}E1122{ended}")
    assert (found.severity.label, found.ranks) == ("error", (1,))
    assert "bad batch" in found.message
    # A launcher's start in between begins another run.
    found = one(f"{steps}{raised}{BANNER}{on}E1122{ended}")
    assert "bad batch" not in found.message


REFUSED = "usage: train.py [-h] --cfg CFG ...\ntrain.py: error: unrecognized arguments: {}\n"


@pytest.mark.parametrize(
    ("words", "code", "said", "fix"),
    [
        ("--local_rank={}", "DDP206", "that its launcher passes", "torchrun, which sets"),
        ("--local_rank={} -m", "DDP206", "passes, nor -m", "are joined"),
        ("--local_rank={} -m torch.distributed.launch a.py", "DDP206", "nor -m", "are joined"),
        ("--local_rank={} -m vgg", "DDP206", "nor -m vgg", "torchrun, which sets"),
        ("out --local-rank={} --amp", "DDP206", "nor out, nor --amp", "torchrun, which sets"),
        ("--gpu {} --amp", "DDP905", "--gpu 0 --amp", "after its name"),
    ],
)
def test_usage_texts_of_several_ranks_are_of_one_run(
    words: str, code: str, said: str, fix: str
) -> None:
    found = one("".join(REFUSED.format(words.format(rank)) for rank in (1, 0, 3, 2)))
    assert found.code == code
    assert said in found.message
    assert fix in found.fix
    assert not any("earlier run" in each for each in found.evidence)
