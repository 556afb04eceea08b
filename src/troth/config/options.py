"""Three flat, frozen option classes; every default is here and nowhere else.

``None`` means "decide from the machine and the model": ``config/resolve.py`` does so and says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from troth.errors import OptionError

DType = Literal["float32", "bfloat16", "float16"]
KvDType = Literal["float32", "bfloat16", "float16", "int8", "fp8"]
Weights = Literal["fp8"]
Inputs = Literal["int8"]
LOCALHOST = "127.0.0.1"
NO_DISK_CACHE = "off"
"""Instead of a folder: a prompt cache in memory only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model, and how its numbers are held."""

    model: str | None = None
    """A path (folder or .gguf), or None for the demo model if it is installed."""
    name: str | None = None
    """Name it is served under; None: derived from the path."""
    device: str | None = None
    """cpu, cuda or cuda:N; None: cuda when present."""
    dtype: DType | None = None
    """Arithmetic of activations; None: float32 on a CPU, bfloat16 on a GPU."""
    kv_dtype: KvDType | None = None
    """Cache format; int8 and fp8, which is for GPUs, keep a scale for each key and value; None: float16 on a CPU, as
    dtype on a GPU."""
    weights: Weights | None = None
    """fp8: round the matrices of attention and feed-forward layers to 8 bits at load, on a GPU; None: as they are."""
    inputs: Inputs | None = None
    """int8: quantised matrices of layers, of up to six bits, meet inputs rounded to 8 bits, on a CPU: prompts and
    batches are computed faster, by coarser numbers; None: inputs of 16 bits."""
    context_tokens: int | None = None
    """Upper bound on prompt plus answer; None: the model's declared limit, or what memory holds."""
    chat_template: str | None = None
    """Path of a Jinja file used instead of the model's own."""
    steady_headers: bool = True
    """Even out what clients change with each request in header lines of the system prompt (a billing nonce)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How requests share one model."""

    max_rows: int | None = None
    """Requests computed together; None: 8 on a CPU, 256 on a GPU."""
    max_waiting: int = 64
    """Requests waiting for a row before new ones are refused with Busy."""
    chunk_tokens: int | None = None
    """Most prompt tokens fed beside running decodes in one step; None: 256 on a CPU, 2,048 on a GPU."""
    step_tokens: int | None = None
    """Most tokens fed in one step; None: chunk_tokens on a CPU, 8,192 on a GPU."""
    kv_memory_bytes: int | None = None
    """Bytes of all block pools; None: by memory plan."""
    memory_soft_bytes: int | None = None
    """Bytes that the engine's process (or its device memory) may hold before the prompt cache makes room; None: nine
    tenths of memory_hard_bytes, or by memory plan.
    """
    memory_hard_bytes: int | None = None
    """Bytes above which new requests are refused; None: by memory plan."""
    threads: int | None = None
    """CPU threads for kernels; None: the cores this process may use."""
    providers: tuple[str, ...] | None = None
    """Order of op providers; None: every available one, fastest first."""
    deterministic: bool = False
    """Whether a request gets the same bits whatever it is computed beside; on a GPU, at some cost."""
    speculation: tuple[str, ...] = ()
    """Who drafts tokens for requests that do not say: ngram, grammar, mtp, draft; empty: nobody. Naming mtp loads the
    model's draft head, which needs a certificate (``troth certify``)."""
    draft_model: str | None = None
    """A path (folder or .gguf) of a second model with the same vocabulary, loaded to draft; None: no second model."""
    speculate_uncertified: bool = False
    """Load a draft head that no certificate speaks for, and say so with every answer. For development."""
    consumer_idle_s: float = 30.0
    """A consumer that reads nothing for this long is cancelled."""
    disk_cache: str | None = None
    """Folder in which the prompt cache outlives the process; NO_DISK_CACHE or None: it does not."""
    disk_cache_bytes: int | None = None
    """Most bytes of all files there; None: 10 GiB or a tenth of the free disk, whichever is less."""

    def __post_init__(self) -> None:
        """Raises OptionError: a number of bytes that is none."""
        for name in ("kv_memory_bytes", "memory_soft_bytes", "memory_hard_bytes", "disk_cache_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise OptionError(f"{name} must be a number of bytes, 0 or more, or None, not {value!r:.80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How the HTTP server faces its clients."""

    host: str = LOCALHOST
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    """Accepted keys (Bearer or x-api-key); empty: no authentication."""
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 64 * 2**20
    max_streams: int = 256
    keepalive_s: float = 10.0
    """Interval of SSE comments while nothing else is sent."""
    request_timeout_s: float | None = None
    """Cancel a request that runs longer; None: never."""
    model_aliases: tuple[tuple[str, str], ...] = ()
    """(requested name, served name) pairs."""
    warm: str | None = None
    """JSON file of prefixes that are computed and pinned before the server says that it serves; None: none."""
