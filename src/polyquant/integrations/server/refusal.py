"""Errors sent to clients."""

from __future__ import annotations

from polyquant.errors import InputError, PolyquantError

__all__ = ["RequestError", "refusal_of"]

_KINDS = {401: "authentication_error", 403: "permission_error", 500: "server_error", 503: "server_error"}


class RequestError(InputError):
    """A rejected request: HTTP status, OpenAI's `code` and `param`; retry_after in seconds if retrying helps."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after
        super().__init__(message)

    @property
    def kind(self) -> str:
        """OpenAI's `type` of the error."""
        return _KINDS.get(self.status, "invalid_request_error")


def refusal_of(problem: PolyquantError) -> RequestError:
    """Convert an exception of polyquant into a RequestError, without local paths."""
    if isinstance(problem, RequestError):
        return problem
    public = PolyquantError(problem.message, expected=problem.expected, found=problem.found, hint=problem.hint)
    return RequestError(str(public), code="invalid_value")
