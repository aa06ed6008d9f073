"""The files of a population: versions in private folders, and the locks that order the processes that write them.

A version never changes; the ledger says which one is current. Every update writes a folder of its own, which is on
disk before the ledger points to it. A crash therefore leaves the old version or the new one, and at worst a folder
that nothing points to. The current version and the one before it are kept, and others are removed. All files are
readable by their owner only: they are as private as the data.

This file has four parts: private files, locks, `Versions`, which uses both, and the same in an object store.

Why not the ledger's `FairFileLock`: both queue processes on two lock files, but a lease must never refuse an update.
The ledger rejects an update that began from an old version, so correctness does not depend on the lease; it only
saves wasted work. A process therefore goes on without the lease where files cannot be locked, or once another process
has been at the *same* update for too long (`FairFileLock` raises `LedgerBusy` after a total wait). A lease is also
re-entrant within a thread, waits only briefly inside a lease of another population, and reports whether it waited.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import unquote

from odograph.compile import cache_folder
from odograph.errors import InvalidArgument, LedgerCorrupt, LedgerError, OdographError, load_extra, type_text
from odograph.ledger.stores.sqlite_files import sync

try:
    import fcntl
except ImportError:  # Windows: everything works without locks
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "LOCK_FILES",
    "ObjectVersions",
    "Versions",
    "hold_lease",
    "is_pinned",
    "link_or_copy",
    "make_file",
    "make_folder",
    "open_versions",
    "parse_location",
    "pin",
    "restrict",
    "write_file",
]

_FOLDER_MODE: Final = 0o700
_FILE_MODE: Final = 0o600
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO

LOCK_FILES: Final = ("next.lock", "step.lock")
LEASE_TIMEOUT: Final = 600.0  # seconds that one update of another process may take
NESTED_LEASE_TIMEOUT: Final = 1.0  # seconds; the same, inside a lease of another population
_POLL_INTERVAL: Final = 0.002  # seconds between two attempts to lock

_SECRET: Final = "secret"  # noqa: S105  the file's name
_SECRET_SIZE: Final = 32  # bytes
_VERSION: Final = re.compile(r"[0-9]{8,}-[0-9a-f]{16}")
_OWN_NAMES: Final = re.compile("|".join(["secret", *map(re.escape, LOCK_FILES), _VERSION.pattern]))
# The scheme of an address, before one slash or two: Path makes one slash of two.
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:)[/\\]")
_FILE_ADDRESS: Final = re.compile(r"file://(/[^?#]*)", re.IGNORECASE)
# A bucket and a folder in it. fsspec would read some other characters as patterns.
_OBJECT_ADDRESS: Final = re.compile(r"s3://[A-Za-z0-9][A-Za-z0-9._-]{1,62}(/(?!\.\.?(/|$))[\w .=+:,'()-]+)+")

_FILES: Final = "files.json"  # in an object store: the files of a version, written last
_FILE_NAME: Final = re.compile(r"[a-z][a-z0-9.-]*")  # of an engine; no other is written on this machine
_FETCHED: Final = "fetch-"  # a version while it is copied from an object store
_FETCH_TIMEOUT: Final = 86_400  # seconds; an older copy was interrupted

_THREAD: Final = threading.local()


# Private files. The mode is set when a file or folder is made: changing it afterwards would leave a moment in which
# other users could open it, and the umask belongs to the whole process with all its threads.


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Make a folder that only its owner can enter; missing parents get the mode that the umask gives."""
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(_FOLDER_MODE)


def make_file(path: Path) -> BinaryIO:
    """Make a new file that only its owner can read, and open it for writing.

    It is buffered: a buffered write writes everything or raises, where an unbuffered one may write a part of it to a
    disk that is almost full.
    """
    return open(path, "xb", opener=_open_private)


def write_file(path: Path, content: bytes) -> None:
    """Make a new file with this content that only its owner can read."""
    with make_file(path) as file:
        file.write(content)


def link_or_copy(old: Path, new: Path) -> None:
    """Carry a file over to the next version: as a hard link, or as a copy where links are not supported."""
    try:
        os.link(old, new)
    except OSError:
        with old.open("rb") as source, make_file(new) as file:
            shutil.copyfileobj(source, file)


def restrict(path: Path) -> None:
    """Remove all rights of other users from a file, or from a folder and everything in it.

    Links are not followed, and files that vanish meanwhile are skipped. A folder comes before its content, so that no
    other user can swap the content in between. Raises `OSError` where the mode cannot be changed.
    """
    for found in _walk(path):
        with suppress(FileNotFoundError):
            mode = found.lstat().st_mode
            if not stat.S_ISLNK(mode) and mode & _OTHERS:
                found.chmod(stat.S_IMODE(mode) & ~_OTHERS)


def _walk(path: Path) -> Iterator[Path]:
    yield path
    for where, folders, files in os.walk(path):  # yields nothing for a file or a link
        yield from (Path(where) / name for name in (*folders, *files))


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, _FILE_MODE)


# Locks. They are files in the population's folder, which every process that charges it can reach, wherever the ledger
# is: on one machine, or on a network file system that locks files for all its machines. They end with their process.


@contextmanager
def hold_lease(folder: Path, timeout: float | None = None) -> Iterator[bool]:
    """Hold the lease of a folder if it can be had; yield whether another process held it first.

    A thread that holds it already, as in a signal handler or a progress callback, does not wait for itself. A thread
    that holds another lease waits only briefly, because the process in front may be waiting for that one.
    """
    held: set[Path] = _THREAD.__dict__.setdefault("held", set())
    folder = Path(os.path.realpath(folder))  # it may have another name, through a link
    with ExitStack() as stack:
        waited = False
        if fcntl is not None and folder not in held:
            timeout = LEASE_TIMEOUT if timeout is None else timeout
            if held:
                timeout = min(timeout, NESTED_LEASE_TIMEOUT)
            held.add(folder)
            stack.callback(held.discard, folder)
            with suppress(OSError):
                waited = _acquire(stack, folder, timeout)
        yield waited


@contextmanager
def pin(folder: Path) -> Iterator[None]:
    """Mark a version as in use, so that no process removes it; without effect where files cannot be locked."""
    with ExitStack() as stack:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(_open_lock(stack, folder, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def is_pinned(folder: Path) -> bool:
    """Return whether a version is in use, by this process or another one."""
    with ExitStack() as stack:
        if fcntl is not None:
            try:
                fcntl.flock(_open_lock(stack, folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:
                return False
        return False


def _acquire(stack: ExitStack, folder: Path, timeout: float) -> bool:
    """Lock both files, then unlock the first for the next process; raise `OSError` if files cannot be locked."""
    following, own = (_open_lock(stack, folder / name) for name in LOCK_FILES)
    waits = [_wait(following, own, timeout)]
    if waits[0] is not None:
        waits.append(_wait(own, own, timeout))
        if waits[1] is not None:
            now = time.time_ns()
            os.utime(own, ns=(now, now))  # tells the processes behind that a new update has begun
        fcntl.flock(following, fcntl.LOCK_UN)
    return waits != [False, False]


def _open_lock(stack: ExitStack, path: Path, flags: int = os.O_CREAT | os.O_RDWR) -> int:
    file = os.open(path, flags | os.O_NOFOLLOW, _FILE_MODE)
    stack.callback(_close_lock, file)
    return file


def _close_lock(file: int) -> None:
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file open too
    os.close(file)


def _wait(file: int, own: int, timeout: float) -> bool | None:
    """Lock a file and return whether it was locked before; None after too long a wait for the same update."""
    began, since = -1, time.monotonic()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found, now = os.fstat(own).st_mtime_ns, time.monotonic()
            if found != began:
                began, since = found, now
            elif now - since >= timeout:
                return None
            time.sleep(_POLL_INTERVAL)
        else:
            return began >= 0


# Versions.


def open_versions(location: object) -> Versions:
    """Return the versions at a location, a folder or an address in an object store, or raise `InvalidArgument`."""
    text = os.fspath(location) if isinstance(location, str | os.PathLike) else None
    if isinstance(location, str) and _OBJECT_ADDRESS.fullmatch(location.rstrip("/")):
        return ObjectVersions(location.rstrip("/"))
    return Versions(parse_location(location if text is None else text))


def parse_location(location: object) -> Path:
    """Return the absolute path of a folder, or raise `InvalidArgument`.

    Without this check, an address such as s3a://bucket would become a folder of that name in the working directory.
    """
    text = os.fspath(location) if isinstance(location, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InvalidArgument(f"location must be the path of a folder (got {type_text(location)})")
    file = _FILE_ADDRESS.fullmatch(text)
    text = unquote(file[1]) if file else text
    scheme = _SCHEME.match(text)
    if scheme is not None and not (os.name == "nt" and len(scheme[1]) == len("C:")):
        # The rest of the address is not shown: it may contain a password.
        raise InvalidArgument(
            f"location must be the path of a folder, or an address such as s3://bucket/folder without credentials"
            f" (got an address that begins with {scheme[1]!r}). Mount other storage as a folder and pass its path;"
            " credentials come from the environment or from fsspec's configuration"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        plain = False
    else:
        plain = bool(text) and "\0" not in text and text[0] != "~"
    if not plain:
        raise InvalidArgument(
            f"location must be the path of a folder (got {text!r}): write the home folder out instead of ~, and use"
            " Unicode characters only"
        )
    return Path(text).absolute()


class Versions:
    """The folder of a population."""

    def __init__(self, location: Path) -> None:
        self.location = location

    @property
    def address(self) -> str:
        """Where the population is, as the ledger records it."""
        return str(self.location)

    def create(self) -> None:
        """Make the folder, and the secret that keys the digests of ids and requests."""
        try:
            self._make()
        except FileExistsError:  # another process was first
            raise InvalidArgument(self._occupied_message()) from None
        except OSError as problem:
            raise InvalidArgument(
                f"location must be a new folder that can be created (got {self.location}: {problem.strerror})"
            ) from problem
        sync(self.location / _SECRET)
        sync(self.location)

    def _make(self) -> None:
        real = Path(os.path.realpath(self.location))  # also resolves a link to itself
        around = next(filter(_is_population, real.parents), None)
        if around is not None:
            raise InvalidArgument(
                f"location must not be within the folder of another population (got a folder in {around}), which"
                " removes files that it does not know. Pass the path of a new folder elsewhere"
            )
        try:
            make_folder(self.location, parents=True)
        except FileExistsError:
            if any(self.location.iterdir()):
                raise InvalidArgument(self._occupied_message()) from None
            restrict(real)
        write_file(self.location / _SECRET, secrets.token_bytes(_SECRET_SIZE))

    def _occupied_message(self) -> str:
        if (self.location / _SECRET).exists():
            return (
                f"location must be a new folder (got {self.location}, which holds a population): open it, or pass"
                " another location. If its creation was interrupted, so that no ledger knows it, remove the folder"
            )
        return f"location must be a new folder or an empty one (got {self.location}, which has files in it)"

    def undo(self, folder: Path) -> None:
        """Undo `create`, for a population whose creation failed."""
        self.discard(folder)
        (self.location / _SECRET).unlink(missing_ok=True)
        with suppress(OSError):  # other files in the folder are left alone
            self.location.rmdir()

    def restrict(self) -> None:
        """Close the files of a population to other users; early releases left their mode to the umask.

        The folder itself keeps its mode if it contains anything besides the population.
        """
        if not _is_population(self.location):
            return  # or this user cannot read it, and the first charge says so
        names = sorted(path.name for path in self.location.iterdir())
        own = [name for name in names if _OWN_NAMES.fullmatch(name)]
        try:
            if own == names:
                restrict(self.location.resolve())
            for name in own:
                restrict(self.location / name)
        except OSError as problem:
            raise LedgerError(
                f"other users may be able to read the population in {self.location}, and this user cannot change"
                f" that: {problem.strerror}. Have the owner of its files run: chmod -R go= {self.location}"
            ) from problem

    def digest(self, *parts: bytes | memoryview) -> str:
        """Return a digest keyed by the secret: it reveals nothing to a reader who does not have that."""
        mac = hmac.new(self.secret(), digestmod=hashlib.sha256)
        for part in parts:
            mac.update(len(part).to_bytes(8, "big"))
            mac.update(part)
        return mac.hexdigest()

    def secret(self) -> bytes:
        """Return the secret."""
        try:
            found = (self.location / _SECRET).read_bytes()
        except OSError as problem:
            raise LedgerError(f"there is no population in {self.location}: {problem.strerror}") from problem
        if len(found) != _SECRET_SIZE:
            raise LedgerError(f"the secret of the population in {self.location} is damaged; restore it from a backup")
        return found

    def lease(self) -> AbstractContextManager[bool]:
        """Let one process update at a time, as far as possible; yields whether another process was first."""
        return hold_lease(self.location)

    def begin(self, version: int) -> Path:
        """Make the folder of a new version, which nothing points to yet."""
        folder = self.location / f"{version:08}-{secrets.token_hex(8)}"
        make_folder(folder)
        return folder

    def folder(self, state: str) -> Path:
        """Return the folder of a version that the ledger points to, which is always below this one."""
        if not _VERSION.fullmatch(state):  # a ledger that was imported may say anything
            raise LedgerCorrupt("an entry names a folder that cannot be a version of a population")
        return self.location / state

    def finish(self, folder: Path) -> None:
        """Bring a new version to the disk: every file in it, and the folder itself."""
        for where, _, files in os.walk(folder, topdown=False):
            for name in files:
                sync(Path(where) / name)
            sync(Path(where))
        sync(self.location)

    def discard(self, folder: Path) -> None:
        """Remove a version that nothing points to."""
        shutil.rmtree(folder, ignore_errors=True)

    def kept(self) -> list[int]:
        """Return the numbers of the versions that have files, and of those that were begun and never finished."""
        return sorted(_number(folder.name) for folder in self.location.iterdir() if _VERSION.fullmatch(folder.name))

    def clean(self, version: int, kept: Collection[str]) -> None:
        """Remove old versions, and folders that never became one, unless they are in `kept` or in use."""
        for folder in self.location.iterdir():
            if _is_old(folder.name, version, kept) and not is_pinned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_old(name: str, version: int, kept: Collection[str]) -> bool:
    """Return whether a folder has the name of a version that is not needed any more, or never was one."""
    return bool(_VERSION.fullmatch(name)) and name not in kept and _number(name) <= version


def _number(name: str) -> int:
    return int(name.partition("-")[0])


def _is_population(folder: Path) -> bool:
    """Return whether a folder holds a population that this user can read."""
    try:
        whole = (folder / _SECRET).stat().st_size == _SECRET_SIZE
        return whole and any(_VERSION.fullmatch(one.name) for one in folder.iterdir())
    except OSError:
        return False


# Object stores. A file appears there whole or not at all, and is read as it was last written. There are no locks, and
# a folder cannot be renamed in one step. Neither is needed: a version has a name of its own, the list of its files is
# written after them, and the ledger points to it after that.


class _StoreUnreachable(LedgerError, OSError):
    """An object store did not do what it was asked for."""


class ObjectVersions(Versions):
    """The versions of a population in an object store, and copies of them in a private folder of this user.

    Engines read and write the copies. A version never changes, so that a copy is fetched once. `location` is the
    private folder; deleting it while no program uses it loses nothing.
    """

    def __init__(self, address: str) -> None:
        name = hashlib.sha256(address.encode()).hexdigest()[:32]
        super().__init__((cache_folder() / "populations" / name).absolute())
        self._address = address
        self._root = address.removeprefix("s3://")
        self._secret: bytes | None = None

    @property
    def address(self) -> str:
        """Where the population is, as the ledger records it."""
        return self._address

    def create(self) -> None:
        """Write the secret, unless anything is there; of two programs at once, the store accepts one."""
        secret = secrets.token_bytes(_SECRET_SIZE)
        with self._reach() as store:
            parents = self._root.split("/")
            around = ["/".join(parents[:size]) for size in range(2, len(parents))]
            if any(store.exists(f"{one}/{_SECRET}") for one in around):
                raise InvalidArgument(
                    f"location must not be within the folder of another population (got {self._address}). Pass"
                    " another address"
                )
            if self._names(store):
                raise InvalidArgument(self._occupied_message())
            try:
                store.pipe_file(f"{self._root}/{_SECRET}", secret, mode="create")
            except Exception:
                if self._names(store):  # another program was first
                    raise InvalidArgument(self._occupied_message()) from None
                raise
        self._secret = secret
        self._make_folder()

    def _occupied_message(self) -> str:
        return (
            f"location must be new (got {self._address}, which has files in it): open the population that is there,"
            " or pass another location. If its creation was interrupted, so that no ledger knows it, remove its files"
        )

    def undo(self, folder: Path) -> None:
        """Undo `create`, for a population whose creation failed."""
        self.discard(folder)
        with suppress(_StoreUnreachable), self._reach() as store:
            store.rm_file(f"{self._root}/{_SECRET}")

    def restrict(self) -> None:
        """Close the copies to other users; who can read an object store is configured there."""
        restrict(self.location)

    def secret(self) -> bytes:
        """Return the secret, which is kept in memory only."""
        if self._secret is None:
            with self._reach() as store:
                try:
                    found = bytes(store.cat_file(f"{self._root}/{_SECRET}"))
                except FileNotFoundError:
                    raise LedgerError(f"there is no population in {self._address}") from None
            if len(found) != _SECRET_SIZE:
                raise LedgerError(f"the secret of the population in {self._address} is damaged; restore it")
            self._secret = found
        return self._secret

    def lease(self) -> AbstractContextManager[bool]:
        """Let one process of this machine update at a time; programs on other machines are not waited for."""
        self._make_folder()
        return super().lease()

    def begin(self, version: int) -> Path:
        """Make the folder of a new version, which nothing points to yet."""
        self._make_folder()
        return super().begin(version)

    def folder(self, state: str) -> Path:
        """Return the copy of a version, which is fetched if it is not there; it may be gone from the store."""
        folder = super().folder(state)
        if not folder.is_dir():
            self._make_folder()
            self._fetch(state, folder)
        return folder

    def finish(self, folder: Path) -> None:
        """Bring a new version to the store: every file in it, and then the list of them."""
        super().finish(folder)
        with self._reach() as store:
            files = {}
            for path in sorted(folder.iterdir()):
                _upload(store, path, f"{self._root}/{folder.name}/{path.name}")
                files[path.name] = _digest_file(path)
            store.pipe_file(f"{self._root}/{folder.name}/{_FILES}", json.dumps({"form": 1, "files": files}).encode())

    def discard(self, folder: Path) -> None:
        """Remove a version that nothing points to, here and in the store."""
        super().discard(folder)
        with suppress(_StoreUnreachable), self._reach() as store:
            self._remove(store, folder.name)

    def kept(self) -> list[int]:
        """Return the same for the files here and in the store."""
        with self._reach() as store:
            there = [_number(name) for name in self._names(store) if _VERSION.fullmatch(name)]
        return sorted(super().kept() + there)

    def clean(self, version: int, kept: Collection[str]) -> None:
        """Remove old versions, and what never became one, here and in the store; what fails is left for the next."""
        for one in self.location.glob(f"{_FETCHED}*"):
            with suppress(FileNotFoundError):
                if time.time() - one.stat().st_mtime > _FETCH_TIMEOUT:
                    shutil.rmtree(one, ignore_errors=True)
        super().clean(version, kept)
        with suppress(_StoreUnreachable), self._reach() as store:
            for name in self._names(store):
                if _is_old(name, version, kept):
                    self._remove(store, name)

    def _fetch(self, state: str, folder: Path) -> None:
        """Copy a version from the store, if it is there; the copy appears whole."""
        source = f"{self._root}/{state}"
        with self._reach() as store:
            try:
                files = _read_files(store.cat_file(f"{source}/{_FILES}"))
            except FileNotFoundError:
                return
            copy = self.location / f"{_FETCHED}{secrets.token_hex(8)}"
            make_folder(copy)
            try:
                for name, digest in files.items():
                    _download(store, f"{source}/{name}", copy / name)
                    if _digest_file(copy / name) != digest:
                        raise LedgerCorrupt(f"{self._address}/{state} is damaged; restore it from a backup")
                super().finish(copy)
                with suppress(OSError):  # another process was first
                    copy.rename(folder)
            finally:
                shutil.rmtree(copy, ignore_errors=True)

    def _names(self, store: Any) -> list[str]:  # noqa: ANN401  a file system of fsspec
        """Return what is in the population's folder."""
        try:
            return sorted({path.rpartition("/")[2] for path in store.ls(self._root, detail=False)} - {""})
        except FileNotFoundError:
            return []

    def _remove(self, store: Any, name: str) -> None:  # noqa: ANN401  as above
        """Remove a version, and the list of its files first."""
        target = f"{self._root}/{name}"
        files = store.find(target)
        for listed in {f"{target}/{_FILES}"} & {*files}:
            store.rm_file(listed)
        if files:
            store.rm(files)

    def _make_folder(self) -> None:
        """Make the private folder if it is not there."""
        try:
            make_folder(self.location, parents=True)
        except FileExistsError:
            restrict(self.location)
        except OSError as problem:
            raise LedgerError(
                f"the folder for copies could not be made in {self.location.parent}: {problem.strerror}. Set"
                " ODOGRAPH_CACHE to a folder that can be written"
            ) from problem

    @contextmanager
    def _reach(self) -> Iterator[Any]:
        """Yield the file system of the store, and replace its errors by our own, which contain no credentials."""
        fsspec = load_extra("fsspec")
        load_extra("s3fs")
        try:
            # A listing that was kept in memory would not show what other programs write.
            yield fsspec.filesystem("s3", use_listings_cache=False)
        except OdographError:
            raise
        except Exception as problem:  # noqa: BLE001  of any library below; their messages may contain credentials
            raise _StoreUnreachable(
                f"{self._address} could not be read or written ({type(problem).__name__}); nothing was changed. Check"
                " that the bucket exists, and fsspec's configuration: its endpoint and credentials for s3"
            ) from None


def _read_files(content: bytes) -> dict[str, str]:
    """Return the names of the files of a version, and their digests."""
    try:
        files = dict(json.loads(content)["files"])
        if all(_FILE_NAME.fullmatch(name) for name in files):
            return files
    except (KeyError, TypeError, ValueError):
        pass
    raise LedgerCorrupt(f"a list of files, {_FILES}, is damaged; restore the population from a backup")


def _upload(store: Any, path: Path, target: str) -> None:  # noqa: ANN401  a file system of fsspec
    store.put_file(str(path), target)


def _download(store: Any, source: str, path: Path) -> None:  # noqa: ANN401  as above
    make_file(path).close()  # its mode stays
    store.get_file(source, str(path))


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.sha256).hexdigest()
