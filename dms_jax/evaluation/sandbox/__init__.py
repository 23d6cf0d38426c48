r"""Run code that a model wrote, in processes that can do nothing but compute.

    sandbox = Sandbox()
    sandbox.run("print(int(input()) + 1)", "41\n")          # Run(output="42\n", failure="")
    sandbox.call("def f(x): return x + 1", "f", [41])       # Run(output=42, failure="")

A confined process is a fresh Python that locks itself in before it reads a line of the model's
code (`inside`):

- time: a limit on processor time (RLIMIT_CPU, then SIGKILL a second later) and one on the wall
  clock; it also dies with the process that started it;
- memory: RLIMIT_AS; no shared memory or memory files; first to go when the machine runs out;
- processes: no fork, no exec; threads are counted one by one by the parent process (seccomp user
  notification), because RLIMIT_NPROC counts a user's processes and never root's;
- files: none can be written, created, renamed or removed; Python's library and the system's shared
  libraries can be read, nothing else (Landlock); modes, owners and attributes cannot be changed.
  Names, sizes and dates of files can be seen, contents cannot;
- network: no sockets of any family, no descriptors of other processes;
- signals: to itself only; no debugging; no access to the priorities, limits or memory of others;
- the environment is empty, standard error is discarded, and output beyond a limit ends it.

All but the first two rest on a list of allowed system calls (`inside/system_calls.py`) and on
Landlock. Both need Linux on x86-64 or aarch64 and no privileges. Where one is missing the sandbox
refuses to run and names it; `allow_weaker=True` runs with what there is.

The sandbox protects the machine, not the score. Expected outputs never enter the process, so
LiveCodeBench's tests cannot be read or faked. HumanEval's tests are code and run in the process of
the answer, as in the original: code that sets out to deceive them can. Exiting early is a failure.

It is part of this package because lm-evaluation-harness runs HumanEval's programs unconfined. The
answers to HumanEval and LiveCodeBench that a model writes here run without network, without files,
and in a gigabyte of memory.
"""

from dms_jax.evaluation.sandbox.confined import Run, Sandbox, cores, side_by_side

__all__ = ["Run", "Sandbox", "cores", "side_by_side"]
