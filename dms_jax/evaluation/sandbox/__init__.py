r"""Runs code that a model wrote, in processes that can do nothing but compute.

    sandbox = Sandbox()
    sandbox.run("print(int(input()) + 1)", "41\n")         # Run(output="42\n", failure="")

A confined process is a fresh Python that locks itself in before it reads a line of the answer's
code (`inside`). What holds it:

- time: a limit on processor time (RLIMIT_CPU; what handles its signal is killed a second later) and
  one on the wall clock, then SIGKILL; it also dies with the process that judges;
- memory: RLIMIT_AS; no shared memory or memory files; and it is the first to go when memory ends;
- processes: none, no fork and no exec; threads are counted by the judging process, one by one
  (seccomp user notification), because RLIMIT_NPROC counts a user's processes and never root's;
- files: none is written, created, renamed or removed, whether it is there already or not; Python's
  library and the system's shared libraries may be read, nothing else (Landlock), and modes, owners
  and attributes may not be changed. Names, sizes and dates of files can be seen; contents cannot;
- network: no sockets of any family, nor descriptors of other processes;
- signals: to itself alone; no debugging, no priorities, limits or memory of others, no privileges;
- the environment is empty, standard error leads nowhere, and output beyond a limit ends it.

All but the first two rest on a list of allowed system calls (`inside/system_calls.py`) and on
Landlock, both for Linux on x86-64 and aarch64 and without privileges. Where one of them is missing
the sandbox refuses to run, and names it; `allow_weaker=True` runs with what there is.

That is containment. Against an answer that pretends to be right:

- tests and expected outputs never enter the process of the answer. Output and results are compared
  by the judging process; tests that are themselves code (HumanEval's) run in a second confined
  process, which calls the answer's function in the first over a socket and alone can report
  success. Exiting early, printing marks, replacing `assert`, `exit` or builtins, and searching
  frames reach nothing that decides;
- results cross over as plain values, so that an object which equals everything is a failure.

Not defended: an answer that computes the expected outputs by a means that was not meant (a table of
answers learned by heart), and faults of the kernel itself. Nor a test that works out what it
expects from an argument after the call: an answer that empties `x` and returns `[]` passes
`assert candidate(x) == sorted(x)`, as in the original HumanEval. What an answer does to its
arguments is done to those of the test, because tests of functions that sort or remove in place look
at them; tests of other functions give a copy, or write down what they expect.
"""

from dms_jax.evaluation.sandbox.confined import Call, Run, Sandbox, cores, side_by_side

__all__ = ["Call", "Run", "Sandbox", "cores", "side_by_side"]
