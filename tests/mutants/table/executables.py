"""Mistakes in stored executables and their keys."""

from tests.mutants.mutant import Mutant

FILE = "dms_jax/executables.py"
PROGRAMS = "dms_jax/generation/programs.py"
TESTS = "tests/test_executables.py"
KEYS = f"{TESTS}::test_a_key_depends_on_settings_and_shapes_not_values"

MUTANTS = [
    Mutant(
        "executables: files that others may write are read",
        FILE,
        "return found.st_uid == os.geteuid() and not found.st_mode & 0o022",
        "return found.st_uid == os.geteuid()",
        (f"{TESTS}::test_world_writable_files_are_not_read[writable by a group]",),
    ),
    Mutant(
        "executables: files of other users are read",
        FILE,
        "return found.st_uid == os.geteuid() and not found.st_mode & 0o022",
        "return not found.st_mode & 0o022",
        (f"{TESTS}::test_a_file_of_another_user_is_not_read",),
    ),
    Mutant(
        "executables: a link is followed",
        FILE,
        'os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)',
        "os.O_RDONLY",
        (f"{TESTS}::test_world_writable_files_are_not_read[a link]",),
    ),
    Mutant(
        "executables: a source that was changed is a witness",
        FILE,
        "if max(found.st_mtime, found.st_ctime) > _BEGUN:",
        "if False:",
        (f"{TESTS}::test_programs_of_changed_source_are_not_stored",),
    ),
    Mutant(
        "executables: classes of any package stand for what they are",
        FILE,
        'if x.__module__.partition(".")[0] not in _PACKAGES or "<" in x.__qualname__:',
        "if False:",
        (f"{TESTS}::test_programs_of_unknown_source_are_not_stored",),
    ),
    Mutant(
        "executables: no key has jax's settings",
        FILE,
        "for name, value in jax.config.values.items()",
        "for name, value in ()",
        (KEYS,),
    ),
    Mutant(
        "executables: no key has the place of an array",
        PROGRAMS,
        "place = leaf.sharding if leaf.committed and not _by_default(leaf.sharding) else None",
        "place = None",
        (KEYS,),
    ),
    Mutant(
        "executables: what jax read from its cache is written again",
        PROGRAMS,
        "            if anew:\n",
        "            if True:\n",
        (f"{TESTS}::test_programs_from_jax_cache_are_not_stored",),
    ),
    Mutant(
        "executables: jax goes on without its cache",
        "dms_jax/compilation.py",
        "            if not _without:\n                _enable_jax_cache(before)",
        "            del before",
        (f"{TESTS}::test_jax_cache_skips_only_our_programs",),
    ),
    Mutant(
        "executables: the newest are deleted",
        FILE,
        "for _, size, file in files:\n        if total",
        "for _, size, file in files[::-1]:\n        if total",
        (f"{TESTS}::test_oldest_files_are_deleted",),
    ),
    Mutant(
        "memory: two processes never find equally many pages",
        "dms_jax/generation/memory.py",
        "if memory is None and rows < pages < needed:",
        "if False:",
        ("tests/generation/test_memory.py::test_pool_size_is_rounded_so_processes_share_programs",),
    ),
]
