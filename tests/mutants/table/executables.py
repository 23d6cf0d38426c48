"""Mistakes in stored executables and their keys."""

from tests.mutants.mutant import Mutant

FILE = "dms_jax/executables.py"
TESTS = "tests/test_executables.py"

MUTANTS = [
    Mutant(
        "executables: files that others may write are read",
        FILE,
        "return found.st_uid == os.geteuid() and not found.st_mode & 0o022",
        "return found.st_uid == os.geteuid()",
        (f"{TESTS}::test_writable_files_are_not_read[writable by a group]",),
    ),
    Mutant(
        "executables: files of other users are read",
        FILE,
        "return found.st_uid == os.geteuid() and not found.st_mode & 0o022",
        "return not found.st_mode & 0o022",
        (f"{TESTS}::test_a_file_of_another_user_is_not_read",),
    ),
]
