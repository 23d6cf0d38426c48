r"""Run model-written code in processes that can only compute.

    sandbox = Sandbox()
    sandbox.run("print(int(input()) + 1)", "41\n")          # Run(output="42\n", failure="")
    sandbox.call("def f(x): return x + 1", "f", [41])       # Run(output=42, failure="")

A confined process is a fresh Python that locks itself in before it reads the model's code
(`inside`):

- time: limits on processor time (RLIMIT_CPU, then SIGKILL a second later) and on wall time; it also
  dies with its parent process;
- memory: RLIMIT_AS; no shared memory or memory files; killed first when the machine runs out;
- processes: no fork, no exec; threads are counted one by one by the parent process (seccomp user
  notification), because RLIMIT_NPROC counts a user's processes and never root's;
- files: none can be written, created, renamed or removed; only Python's library and the system's
  shared libraries can be read (Landlock); modes, owners and attributes cannot be changed. Names,
  sizes and dates of other files are visible, contents are not;
- network: no sockets of any family, no descriptors of other processes;
- signals: only to itself; no debugging; no access to other processes' priorities, limits or memory;
- the environment is empty, standard error is discarded, and output beyond a limit ends the process.

All but the first two use an allow list of system calls (`inside/system_calls.py`) and Landlock.
Both need Linux on x86-64 or aarch64, without privileges. If one is missing, the sandbox refuses to
run and names it; `allow_weaker=True` runs with the available ones.

The sandbox protects the machine, not the score. Expected outputs never enter the process, so
LiveCodeBench's tests cannot be read or faked. HumanEval's tests are code and run in the process of
the answer, as in the original, so malicious code can deceive them. Exiting early is a failure.

lm-evaluation-harness runs HumanEval's programs unconfined; here a model's answers to HumanEval and
LiveCodeBench run without network, without files, and in a gigabyte of memory. That is why the
sandbox is part of this package.
"""

from dms_jax.evaluation.sandbox.confined import Run, Sandbox, cores, side_by_side

__all__ = ["Run", "Sandbox", "cores", "side_by_side"]
