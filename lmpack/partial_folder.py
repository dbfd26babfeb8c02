"""PartialFolder: the folder beside a destination in which a pack is built, and how it becomes the pack."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from lmpack.drive import alone_in, read_into, storage_errors, sync_path, sync_tree, write_from
from lmpack.errors import ManifestError, UsageError
from lmpack.expert_key import ExpertKey
from lmpack.manifest import MANIFEST_FILE, SHARED_FILE
from lmpack.pack import read_manifest, refuse_inside_pack
from lmpack.pack_files import FOLDER, SPECIAL, expected_files, found_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lmpack.manifest import Manifest

PARTIAL_SUFFIX = ".partial"
JOURNAL_FILE = "journal"
"""What a conversion notes about its progress; publishing the pack deletes it."""
REPLACEMENT_SUFFIX = ".new"
"""What is added to a file's name while another form of it is written beside it."""
_UNFINISHED_MANIFEST = MANIFEST_FILE + PARTIAL_SUFFIX
_WAIT = "another process is writing it; wait for it"
_DELETE_IT = "a command that was killed left it; delete it first"
_RESUME_IT = "an interrupted conversion left it: continue it with --resume, or delete it first"
_RESUME_THAT = (
    "it has an interrupted conversion's weights: continue that one with --resume, or delete it first"
)


class PartialFolder:
    """`destination.partial`; nothing has the destination's name until publish() or complete() returns.

    With resume the folder of an interrupted run is taken over as it is; without, one that exists is refused. From
    create() on no other process gets into it, until close(), complete() or the process's end.
    """

    def __init__(self, destination: Path, *, resume: bool, is_resumable: bool = True) -> None:
        """Refuse (UsageError) what stands in the way, with advice; nothing is created yet.

        is_resumable says whether a partial folder of the caller's can be taken over, once there is a journal in it.
        """
        check_destination(destination)
        self.destination = destination
        self.path = destination.with_name(destination.name + PARTIAL_SUFFIX)
        self.resume = resume
        self._is_resumable = is_resumable
        self._created = False
        self._alone = ExitStack()
        if not resume:
            self._refuse_leftover()

    def create(self) -> None:
        """Make the folder, once; raises UsageError when another process has it, or it appeared meanwhile."""
        if self._created:
            return
        with storage_errors(self.path):
            if os.path.islink(self.path):
                raise UsageError(f"{self.path}: is a link; delete it, then convert without --resume")
            try:
                os.makedirs(self.path, exist_ok=self.resume)
            except FileExistsError:
                self._refuse_leftover()
                raise
        self._alone.enter_context(alone_in(self.path, _WAIT))
        self._created = True

    def close(self) -> None:
        """Let another process have the folder, if there is one."""
        self._alone.close()

    def _refuse_leftover(self) -> None:
        """Tell a folder that a process works in from one that a killed process left."""
        if os.path.isdir(self.path):
            with alone_in(self.path, _WAIT):
                pass
        begun = any(os.path.lexists(self.path / file) for file in (JOURNAL_FILE, MANIFEST_FILE))
        advice = _RESUME_IT if self._is_resumable and begun else _DELETE_IT
        if not self._is_resumable and begun and os.path.lexists(self.path / SHARED_FILE):
            advice = _RESUME_THAT
        _refuse_existing(self.path, advice)

    @contextmanager
    def discarded_on_failure(self) -> Iterator[None]:
        """Leave nothing behind when the block fails."""
        try:
            yield
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            self.close()
            raise

    def used(self) -> tuple[int, int]:
        """The bytes and files that the folder takes on the drive already."""
        files = found_files(self.path) if self.path.is_dir() else {}
        with storage_errors(self.path):
            return sum(os.lstat(self.path / file).st_blocks * 512 for file in files), len(files)

    def refuse_strangers(self, draft: Manifest) -> None:
        """Raise UsageError for a file that a pack with this layout does not have, or a link: it would end up inside it.

        Replacements that an earlier run did not complete are deleted.
        """
        known = {*expected_files(draft), JOURNAL_FILE, MANIFEST_FILE, _UNFINISHED_MANIFEST}
        found = found_files(self.path)
        links = {file for file, nbytes in found.items() if nbytes == SPECIAL}
        for file in sorted(links | {file for file in found.keys() - known if found[file] != FOLDER}):
            if file not in links and file.removesuffix(REPLACEMENT_SUFFIX) in known:
                with storage_errors(self.path / file):
                    os.unlink(self.path / file)
                continue
            raise UsageError(f"{self.path / file}: is no part of this pack; move it away, then resume")

    def write(
        self, file: str, offset: int, view: memoryview | bytes, *, file_nbytes: int | None = None
    ) -> None:
        """Write bytes of a file, which is made when it is new; file_nbytes then cuts or fills it to that size."""
        path = self.path / file
        with storage_errors(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                if os.fstat(descriptor).st_nlink > 1:
                    raise UsageError(
                        f"{path}: has another name somewhere (a hard link), which must not change; delete {self.path}"
                    )
                write_from(memoryview(view), descriptor, offset)
                if file_nbytes is not None:
                    os.ftruncate(descriptor, file_nbytes)
            finally:
                os.close(descriptor)

    def read_back(self, file: str, offset: int, view: memoryview) -> bool:
        """Fill view with bytes that an earlier run wrote; False when the file does not have them."""
        path = self.path / file
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return False
        with storage_errors(path):
            try:
                return read_into(view, descriptor, offset) == view.nbytes
            finally:
                os.close(descriptor)

    def manifest(self) -> Manifest | None:
        """Return the manifest of a pack that is whole but for its name; one that cannot be read is deleted."""
        path = self.path / MANIFEST_FILE
        if not os.path.lexists(path):
            return None
        try:
            return read_manifest(self.path)
        except ManifestError:
            self.drop_manifest()
            return None

    def drop_manifest(self) -> None:
        """Make the folder one that is still being built."""
        with storage_errors(self.path):
            os.unlink(self.path / MANIFEST_FILE)

    def sync(self) -> None:
        """Return once everything in the folder is on the drive."""
        with storage_errors(self.path):
            sync_tree(self.path)

    def publish(self, raw_manifest: bytes, manifest: Manifest) -> None:
        """Put the manifest in place when all else is on the drive, then do what complete() does."""
        self.sync()
        with storage_errors(self.path):
            unfinished = self.path / _UNFINISHED_MANIFEST
            with open(unfinished, "wb") as file:
                file.write(raw_manifest)
                file.flush()
                os.fsync(file.fileno())
            os.rename(unfinished, self.path / MANIFEST_FILE)
            sync_path(self.path)
        self.complete(manifest)

    def complete(self, manifest: Manifest) -> None:
        """Delete what the manifest does not name (experts that have a double, the journal); rename the folder."""
        with storage_errors(self.path):
            self._drop_doubles(manifest)
            (self.path / JOURNAL_FILE).unlink(missing_ok=True)
            sync_path(self.path)
            _refuse_existing(
                self.destination, f"it appeared meanwhile; the pack is whole in {self.path}, rename it"
            )
            os.rename(self.path, self.destination)
            sync_path(self.destination.absolute().parent)
        self.close()

    def _drop_doubles(self, manifest: Manifest) -> None:
        for layer in manifest.layers:
            files = [ExpertKey(layer.layer, number).file for number in range(layer.num_experts)]
            doubles = [file for file, expert in zip(files, layer.experts, strict=True) if expert.file != file]
            for file in doubles:
                (self.path / file).unlink(missing_ok=True)
            folder = (self.path / files[0]).parent
            if len(doubles) == len(files) and folder.is_dir():
                folder.rmdir()


def check_destination(path: Path) -> None:
    """Raise UsageError for a place where something is, or that is inside of a pack."""
    if os.path.lexists(path / MANIFEST_FILE):
        _refuse_existing(
            path,
            "it is a pack: nothing is left to do if an earlier run made it (check it with lmpack validate); "
            "otherwise choose another name, or delete it first",
        )
    _refuse_existing(path, "choose another name, or delete it first")
    refuse_inside_pack(path)


def _refuse_existing(path: Path, advice: str) -> None:
    if os.path.lexists(path):
        raise UsageError(f"{path}: exists; {advice}")
