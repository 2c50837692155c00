"""What the simulator, the models and the planner take and give, as plain dicts.

Times are whole nanoseconds, sizes bytes, rates per second. The Rust types of the same names say more:
``rtvirtio_sim::path``, ``rtvirtio_spec::{settings, profile, plan}``.
"""

from typing import Literal, NotRequired, TypedDict


class Stalls(TypedDict):
    """Times in which a device serves nothing."""

    length: int
    mean_interval: int


class Device(TypedDict):
    """A simulated device (``rtvirtio_ssd::SsdConfig``)."""

    channels: int
    mean_service: int
    sigma: float
    length_slope: float
    stalls: Stalls | None


class Bfq(TypedDict):
    """bfq and its parameters."""

    name: Literal["bfq"]
    slice_idle_us: int
    timeout_sync_ms: int
    low_latency: bool
    max_budget: int


class OtherScheduler(TypedDict):
    """A scheduler without parameters of ours."""

    name: Literal["none", "mq-deadline", "kyber"]


Scheduler = Bfq | OtherScheduler


class Kernel(TypedDict):
    """The host kernel's block layer before the device."""

    kind: Literal["kernel"]
    scheduler: Scheduler


class DataPlane(TypedDict):
    """The data plane's schedule before the device."""

    kind: Literal["data-plane"]


class Limits(TypedDict):
    """Limits of a cgroup; None: no limit."""

    read_bps: int | None
    write_bps: int | None
    read_iops: int | None
    write_iops: int | None


class Task(TypedDict):
    """One task: a rate (None: as much as it can), request size, reads (0 to 1), requests in flight."""

    iops: float | None
    block_size: int
    read_fraction: float
    queue_depth: int
    deadline: NotRequired[int | None]


#: A process's I/O class and level: {"real-time": 0} to {"best-effort": 7}.
Priority = dict[str, int]


class Vm(TypedDict):
    """One VM; without ``guest`` its tasks are processes of the host."""

    weight: int
    limits: NotRequired[Limits]
    priority: NotRequired[Priority | None]
    guest: NotRequired[Scheduler | None]
    tasks: list[Task]


class Until(TypedDict):
    """So many samples beyond a percentile, of each task with a rate."""

    percentile: float
    beyond: int


class Length(TypedDict):
    """How long to measure."""

    at_least: int
    until: NotRequired[Until | None]
    at_most: int


class Condition(TypedDict):
    """All that a simulation's outcome is a function of."""

    device: Device
    service: Kernel | DataPlane
    nesting: NotRequired[int]
    seasoned: NotRequired[bool]
    transport: NotRequired[int]
    software: NotRequired[int]
    vms: list[Vm]
    warm_up: int
    length: Length
    seed: int


class Quantile(TypedDict):
    """A measured percentile with its 95 % interval."""

    percentile: float
    value: int
    low: int
    high: int
    n: int
    beyond: int


class TaskOutcome(TypedDict):
    """What one task had in the measured window."""

    delivered_iops: float
    delivered_bps: float
    mean: int
    max: int
    judged: Quantile | None
    quantiles: list[Quantile]


class Outcome(TypedDict):
    """What a condition gave: each VM's tasks in the condition's order."""

    window: int
    requests: int
    vms: list[list[TaskOutcome]]


class VmSettings(TypedDict):
    """A VM's weight and limits on a device."""

    weight: int
    limits: Limits


class DeviceSettings(TypedDict):
    """A device's scheduler, and each VM's settings there."""

    scheduler: Scheduler
    vms: dict[str, VmSettings]


class SchemeSettings(TypedDict):
    """What a compared scheme sets: the host's settings, and priorities by VM."""

    settings: dict[str, DeviceSettings]
    priorities: dict[str, Priority]


class Unmet(TypedDict):
    """Why a target cannot be promised: ``cause``, such as ``above-target``, and the figures of that cause."""

    cause: str


class Promise(TypedDict):
    """What a plan promises one task."""

    vm: str
    task: str
    percentile: float
    target: int
    predicted: int
    bound: int | None
    confidence: float
    delivered: float
    unmet: Unmet | None


class Prediction(Promise):
    """What the models say of one task; ``paper`` is the paper's model where bfq idles."""

    paper: int | None
    paper_bound: int | None


class Plan(TypedDict):
    """A plan, as ``rtvirtio plan --json`` prints it."""

    version: int
    devices: list[dict[str, object]]
    vms: list[dict[str, object]]
    settings: dict[str, DeviceSettings]
    guests: object
    data_plane: dict[str, object] | None
    observed: list[list[object]]
    changes: list[dict[str, object]]
    tasks: list[Promise]
    background: list[dict[str, object]]
    cost: list[dict[str, object]]
    iothreads: object
    reasons: list[dict[str, object]]


class PaperFit(TypedDict):
    """The paper's lambdas (Table III) and T_agg, bytes per second."""

    weight: float
    timeout_sync: float
    slice_idle: float
    throughput: int


# A calibrated device, as `rtvirtio calibrate` writes it (JSON).
Profile = dict[str, object]
Regime = Literal["flowing", "bursting", "flooded", "idling", "idling-flooded", "controlled"]
Reading = Literal["corrected", "printed"]
