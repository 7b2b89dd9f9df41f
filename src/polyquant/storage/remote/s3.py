"""Multipart uploads to S3 and to servers with its interface, through s3fs.

Every object that is written carries the token of its upload as metadata (x-amz-meta-polyquant), so that a run finds out
whether a request whose answer was lost has been carried out, and never removes an object of others.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from polyquant.errors import PlanError, RemoteError
from polyquant.storage.locations import RemotePath
from polyquant.storage.remote.objects import Objects
from polyquant.storage.remote.retry import FailedRequestError

__all__ = ["S3", "Found", "UploadGoneError"]

T = TypeVar("T")
_TOKEN = "polyquant"  # noqa: S105 - the name of a metadata entry
_KMS = ("aws:kms", "aws:kms:dsse")


class UploadGoneError(RemoteError):
    """The server no longer knows an unfinished upload."""


class Found(NamedTuple):
    """An existing object. token: of the upload that wrote it, "" if it is not one of ours."""

    size: int
    token: str


class S3:
    """Objects of s3://. Failed requests are repeated; errors are RemoteError, and PlanError for an existing object."""

    def __init__(self, path: RemotePath) -> None:
        self._objects = Objects(path)

    def begin(self, path: RemotePath, token: str) -> str:
        """Begin an upload and return its id. Raises RemoteError for a missing bucket."""

        def ask(fs: Any, where: Mapping[str, str]) -> str:
            try:
                return str(fs.call_s3("create_multipart_upload", **where, Metadata={_TOKEN: token})["UploadId"])
            except FileNotFoundError:
                raise _no_bucket(path, where) from None

        return self._call(path, ask)

    def begun(self, prefix: RemotePath) -> set[tuple[str, str]]:
        """All unfinished uploads of objects whose URL begins with `prefix`: (URL, upload id)."""

        def ask(fs: Any, where: Mapping[str, str]) -> set[tuple[str, str]]:
            out: set[tuple[str, str]] = set()
            marker: dict[str, str] = {}
            while True:
                try:
                    answer = fs.call_s3("list_multipart_uploads", Bucket=where["Bucket"], Prefix=where["Key"], **marker)
                except FileNotFoundError:
                    raise _no_bucket(prefix, where) from None
                found = answer.get("Uploads") or []
                out |= {(f"{prefix.parts[0]}//{where['Bucket']}/{u['Key']}", str(u["UploadId"])) for u in found}
                if not answer.get("IsTruncated") or not found:
                    return out
                marker = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

        return self._call(prefix, ask)

    def store(self, path: RemotePath, upload: str, number: int, data: bytearray) -> str:
        """Upload one part and return its ETag, after a check that these bytes were stored."""
        md5 = hashlib.md5(data, usedforsecurity=False)

        def ask(fs: Any, where: Mapping[str, str]) -> str:
            sum_ = base64.b64encode(md5.digest()).decode()
            try:
                answer = fs.call_s3(
                    "upload_part", **where, UploadId=upload, PartNumber=number, Body=data, ContentMD5=sum_
                )
            except FileNotFoundError:
                raise _gone(path) from None
            return _checked(answer, md5.hexdigest())

        return self._call(path, ask)

    def stored(self, path: RemotePath, upload: str) -> dict[int, str] | None:
        """The parts of an upload with their ETags; None if there is no such upload any more."""

        def ask(fs: Any, where: Mapping[str, str]) -> dict[int, str] | None:
            out: dict[int, str] = {}
            marker = 0
            while True:
                try:
                    answer = fs.call_s3("list_parts", **where, UploadId=upload, PartNumberMarker=marker)
                except FileNotFoundError:
                    return None
                parts = answer.get("Parts") or []
                out |= {int(part["PartNumber"]): str(part["ETag"]).strip('"') for part in parts}
                if not answer.get("IsTruncated") or not parts:
                    return out
                marker = int(parts[-1]["PartNumber"])

        return self._call(path, ask)

    def complete(self, path: RemotePath, upload: str, etags: Sequence[str], token: str, *, replace: bool) -> None:
        """Make the object of an upload visible. Raises PlanError if it exists and replace is False."""
        parts = [{"PartNumber": i, "ETag": etag} for i, etag in enumerate(etags, 1)]

        def ask(fs: Any, where: Mapping[str, str]) -> None:
            send = {**where, "UploadId": upload, "MultipartUpload": {"Parts": parts}}
            try:
                _unless_exists(fs, "complete_multipart_upload", send, replace=replace)
            except (FileNotFoundError, FileExistsError) as problem:
                if self._found(fs, where).token == token:  # carried out by an earlier attempt, whose answer was lost
                    return
                raise (_exists(path) if isinstance(problem, FileExistsError) else _gone(path)) from None

        self._call(path, ask)

    def put(self, path: RemotePath, data: bytes, token: str, *, replace: bool) -> None:
        """Write a small object. Raises PlanError if it exists and replace is False."""
        md5 = hashlib.md5(data, usedforsecurity=False)

        def ask(fs: Any, where: Mapping[str, str]) -> None:
            sum_ = base64.b64encode(md5.digest()).decode()
            send = {**where, "Body": data, "ContentMD5": sum_, "Metadata": {_TOKEN: token}}
            try:
                try:
                    answer = _unless_exists(fs, "put_object", send, replace=replace)
                except FileExistsError:
                    if self._found(fs, where).token != token:
                        raise _exists(path) from None
                    answer = fs.call_s3("put_object", **send)  # of an earlier attempt, perhaps damaged
                _checked(answer, md5.hexdigest())
            except FileNotFoundError:
                raise _no_bucket(path, where) from None

        self._call(path, ask)

    def found(self, path: RemotePath) -> Found | None:
        """Return the object as it is on the server now; None if there is none."""

        def ask(fs: Any, where: Mapping[str, str]) -> Found | None:
            found = self._found(fs, where)
            return found if found.size >= 0 else None

        return self._call(path, ask)

    def abort(self, path: RemotePath, upload: str) -> None:
        """Discard an upload and its parts."""

        def ask(fs: Any, where: Mapping[str, str]) -> None:
            try:
                fs.call_s3("abort_multipart_upload", **where, UploadId=upload)
            except FileNotFoundError:
                return

        self._call(path, ask)

    def remove(self, path: RemotePath) -> None:
        """Remove an object."""
        self._call(path, lambda fs, where: fs.call_s3("delete_object", **where))

    def _found(self, fs: Any, where: Mapping[str, str]) -> Found:
        """Ask for size and token; Found(-1, "") if there is no such object."""
        try:
            answer = fs.call_s3("head_object", **where)
        except FileNotFoundError:
            return Found(-1, "")
        return Found(int(answer["ContentLength"]), str((answer.get("Metadata") or {}).get(_TOKEN, "")))

    def _call(self, path: RemotePath, ask: Callable[[Any, Mapping[str, str]], T]) -> T:
        def located(fs: Any, inside: str) -> T:
            bucket, key, _ = fs.split_path(inside)
            return ask(fs, {"Bucket": bucket, "Key": key})

        return self._objects.call(path, located, doing="written")


def _checked(answer: Mapping[str, Any], md5: str) -> str:
    """Return the ETag. Raises FailedRequestError if the server has stored other bytes."""
    etag = str(answer.get("ETag", "")).strip('"')
    encrypted = answer.get("ServerSideEncryption") in _KMS or answer.get("SSECustomerAlgorithm")
    if not etag or (etag != md5 and not encrypted):  # an ETag is the MD5 unless the server encrypts with such a key
        raise FailedRequestError("the server has stored other bytes than were sent")
    return etag


def _unless_exists(fs: Any, method: str, send: Mapping[str, Any], *, replace: bool) -> Mapping[str, Any]:
    """Call a method that creates an object. Raises FileExistsError if it exists and replace is False."""
    if not replace:
        try:
            fs.call_s3("head_object", Bucket=send["Bucket"], Key=send["Key"])
        except FileNotFoundError:
            pass
        else:
            raise FileExistsError
    condition = {} if replace else {"IfNoneMatch": "*"}
    try:
        answer: Mapping[str, Any] = fs.call_s3(method, **send, **condition)
    except FileExistsError:
        raise
    except OSError as problem:
        code = getattr(problem.__cause__, "response", {}).get("Error", {}).get("Code")
        if code in ("PreconditionFailed", "412"):
            raise FileExistsError from None
        if not condition or code not in ("NotImplemented", "501"):  # else a server without conditional writes
            raise
        answer = fs.call_s3(method, **send)
    return answer


def _exists(path: RemotePath) -> PlanError:
    return PlanError("target exists", file=path, hint="choose another name, or pass --overwrite")


def _gone(path: RemotePath) -> UploadGoneError:
    return UploadGoneError(
        "the unfinished upload was removed from the server", file=path, hint="run again to start a new one"
    )


def _no_bucket(path: RemotePath, where: Mapping[str, str]) -> RemoteError:
    return RemoteError(
        "cannot be written: the bucket does not exist",
        file=path,
        found=where["Bucket"],
        hint="create it, or check the name",
    )
