from collections.abc import Callable, Sequence
import enum
from typing import Annotated, overload

import numpy
from numpy.typing import NDArray


class TableSpec:
    """
    One table as the pool keeps it; dtype, optimizer and pooling by number.
    """

    def __init__(self, *, name: str, num_embeddings: int, embedding_dim: int, dtype: int, optimizer: int, pooling: int, init_low: float, init_high: float, first_shard: int = 0, table_shards: int = 0, keys: int = 0, ttl_steps: int = 0, max_keys: int = 0, admit_after: int = 0, turned_away: Sequence[int] = [], stay: Sequence[int] = []) -> None:
        """
        table_shards: 0 in a pool without shards, 1 for a whole table in first_shard, else all of the pool's. keys: 0 where ids are row numbers, 1 where they are keys of 64 bits. turned_away: of a key's occurrences 1 to 16, the chance that it is not admitted, in units of 2^-32, or none: it is. stay: the steps that a key of 2^i updates or more stays longer, i from 0 to 23, or none.
        """

    @property
    def name(self) -> str: ...

    @property
    def num_embeddings(self) -> int: ...

    @property
    def embedding_dim(self) -> int: ...

    @property
    def dtype(self) -> int: ...

    @property
    def optimizer(self) -> int: ...

    @property
    def pooling(self) -> int: ...

    @property
    def init_low(self) -> float: ...

    @property
    def init_high(self) -> float: ...

    @property
    def first_shard(self) -> int: ...

    @property
    def table_shards(self) -> int: ...

    @property
    def keys(self) -> int: ...

    @property
    def ttl_steps(self) -> int: ...

    @property
    def max_keys(self) -> int: ...

    @property
    def admit_after(self) -> int: ...

    @property
    def turned_away(self) -> list[int]: ...

    @property
    def stay(self) -> list[int]: ...

class Plan:
    """A batch's unique rows per table and where they occur."""

    @property
    def num_bags(self) -> int: ...

    @property
    def num_unique(self) -> int: ...

    @property
    def num_lookups(self) -> int: ...

    @property
    def output_width(self) -> int: ...

    def rows(self, table: int) -> list[int]:
        """The unique rows of one of the collection's tables, ascending."""

    def keys(self, table: int) -> list[int]:
        """
        Of a table whose ids are keys: those of its rows, as 64 bits without a sign; else nothing.
        """

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Per feature, which of the batch's ids are its: (begin, end)."""

    @property
    def output_floats(self) -> list[int]:
        """Of a routed plan: how much of the output each trainer gets."""

class Collection:
    """Which features read which tables of a pool."""

    @property
    def output_width(self) -> int: ...

    @property
    def takes_mean(self) -> list[bool]:
        """
        Of each table: whether its lookups divide a bag's sum by the bag's length. An owner's of a split table do not: it has parts of bags.
        """

    def plan(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray, dict(shape=(None,), order='C', device='cpu', writable=False)], weights: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, block_of: Sequence[int], num_blocks: int, parallel: bool, evaluates: bool = False) -> Plan:
        """
        Plans a batch; ids int64, offsets int32 or int64 [num_blocks * batch_size + 1]. evaluates: it is only looked up, so new keys get no rows. Raises IdError, PoolFull.
        """

    def plan_routed(self, counts: Annotated[NDArray[numpy.int64], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], messages: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], parallel: bool, evaluates: bool = False) -> Plan:
        """
        Plans what trainers sent, their messages one after the other; counts int64 [num_trainers, num_features, 2], as their routes say for this owner. The output is [1, output_width], trainer by trainer. evaluates: it is only looked up, so new keys get no rows. Raises DataError, PoolFull.
        """

class Route:
    """Where one batch's ids went. Its arrays are views of it."""

    @property
    def num_bags(self) -> int: ...

    @property
    def counts(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None, None, None))]:
        """
        int64 [num_owners, num_features, 2]: bags; ids, and 2^32 more where they have per-sample weights, and 2^33 for each distinct place where they are numbered.
        """

    @property
    def message(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """What the owners are told, one after the other."""

    @property
    def message_words(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """Of each owner."""

    @property
    def block_floats(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """
        Of each owner: how many floats of vectors it sends back, and of gradients it gets.
        """

    def combine(self, blocks: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        Pools the owners' blocks, one after the other, into out [num_bags, output_width].
        """

    def spread(self, grad: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], blocks: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """The owners' blocks of gradients, from grad [num_bags, output_width]."""

    def gather_weights(self, blocks: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """
        The gradients of per-sample weights, from what the owners sent of each of their ids, into out, parallel to the batch's ids.
        """

class Router:
    """
    Cuts a trainer's ids among the owners of their rows, and joins what comes back.
    """

    def __init__(self, tables: Sequence[tuple[int, int, int, int, bool, tuple[int, int] | None]], features: Sequence[tuple[str, int]], owner_of_shard: Sequence[int], num_owners: int, numbers_ids: bool = False) -> None:
        """
        tables: (num_embeddings, embedding_dim, pooling, first_shard, whether it is split, (pool seed, the table's number) where its ids are keys, else None). numbers_ids: trainers sort for the owners, where messages do not get longer by it.
        """

    @property
    def output_width(self) -> int: ...

    def message_words(self, counts: Annotated[NDArray[numpy.int64], dict(shape=(None, None, None), order='C', device='cpu', writable=False)]) -> list[int]:
        """
        Of the messages with these counts: int64 [num_messages, num_features, 2].
        """

    def route(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray, dict(shape=(None,), order='C', device='cpu', writable=False)], weights: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, block_of: Sequence[int], num_blocks: int, begin: int, end: int) -> Route:
        """
        Routes samples begin .. end of a batch, whose arrays are as Collection.plan takes them. Raises IdError.
        """

class Reception(enum.Enum):
    """What became of a message that was waited for."""

    RECEIVED = 0

    NOT_YET = 1

    GONE = 2

class ChannelWriter:
    """Messages to a process on the same machine, through memory."""

    def __init__(self, capacity: int) -> None:
        """
        capacity: bytes before it is outgrown. Raises RuntimeError where the system gives no memory for it.
        """

    @property
    def address(self) -> tuple[int, int, int]:
        """Where another process finds it, before the first message."""

    def send(self, data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        Copies it, and waits for nobody. Raises RuntimeError where there is no memory.
        """

    def close(self) -> None:
        """Nothing more will come."""

class ChannelReader:
    """Messages of a process on the same machine."""

    def __init__(self, address: tuple[int, int, int]) -> None:
        """Raises RuntimeError where that process cannot be reached."""

    def receive(self, out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], seconds: float) -> Reception:
        """
        Takes the next message into `out`, whose size it has to have: else raises RuntimeError.
        """

class Admission:
    """
    A plan's rows in their slots. They keep them until it is released, or gone.
    """

    @property
    def plan(self) -> Plan: ...

    @property
    def num_unique(self) -> int: ...

    @property
    def num_lookups(self) -> int: ...

    @property
    def num_missing(self) -> int:
        """Rows whose bytes have to be brought."""

    @property
    def max_occurrences(self) -> int:
        """Of one row."""

    @property
    def packed_bytes(self) -> int:
        """What pack needs."""

    def pack(self, out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> dict[str, tuple[int, int]]:
        """
        Writes into `out`, whose first byte is at a multiple of 8, what kernels need, and says where: {name: (byte offset, number of elements)}, offsets multiples of 128. With U unique rows (the directory's tables in order, rows ascending), M of them missing, L lookups and F features of B bags: slots int32 [U], rows int64 [U] (their numbers in the whole table), places int64 [U] (where a table is split: which rows of the mapping they are), tables int32 [U] (the pool's numbers), keys int64 [U] (of tables with keys), shards int32 [U] (of such where one is split: the rows'), missing int32 [M] (indexes of unique rows, ascending), row_start int32 [U + 1] and gradient_offset int32 [L] (of each row's occurrences, in order: where its bag begins in [num_bags, output_width]), gradient_scale float32 [L] (absent where all are 1), lookup_slot int32 [L] (in the order of the batch), bag_start int32 [F * B + 1] (indexes into lookup_slot), lookup_scale float32 [L] (per-sample weights; absent without), columns int32 [F]. A routed plan's output is [1, output_width], and each of its bags has columns of its own: columns int32 [bags]. Raises ConfigError where an offset does not fit, StepError after the release.
        """

class SlotDirectory:
    """Which slot of a device's memory has which row. Thread-safe."""

    def __init__(self, collection: Collection, tables: Sequence[int], num_slots: int, *, keep: bool = True) -> None:
        """
        tables: indexes into the collection's, ascending; their rows share the slots. keep: rows that nobody holds stay until their slots are needed. Raises ConfigError.
        """

    def admit(self, plan: Plan) -> Admission | None:
        """
        Slots for all of the plan's rows; None, and nothing has changed, where there is no room before others are released. Raises WindowTooLarge where there are fewer slots than rows, ConfigError where the plan is another collection's.
        """

    def release(self, admission: Admission) -> None:
        """
        Its rows may lose their slots from now on. Again: nothing happens. Raises ConfigError where it is another directory's.
        """

    def forget(self, admission: Admission) -> None:
        """
        As release; and its missing rows have never come: they are missing again for whoever admits them next. Admissions made since that have these rows rely on what is not there: forget them as well.
        """

    def clear(self) -> None:
        """The rows that nobody holds lose their slots."""

    @property
    def num_slots(self) -> int: ...

    @property
    def num_resident(self) -> int:
        """Rows that have slots."""

    @property
    def num_held(self) -> int: ...

    @property
    def rows_hit(self) -> int:
        """Rows of all admissions that were there."""

    @property
    def rows_missed(self) -> int:
        """And that were missing."""

class Capture:
    """One forward's rows, as logged."""

    @property
    def step(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def plan(self) -> Plan: ...

class SummedGradients:
    """Row gradients summed per unique row."""

    @property
    def sum_of_squares(self) -> float: ...

class RecoveryReport:
    """What recovery found, and what it did."""

    @property
    def clean(self) -> bool: ...

    @property
    def epoch(self) -> int: ...

    @property
    def rows_step(self) -> int: ...

    @property
    def dense_step(self) -> int | None: ...

    @property
    def step(self) -> int: ...

    @property
    def cursor(self) -> int: ...

    @property
    def records_undone(self) -> int: ...

    @property
    def rows_restored(self) -> int: ...

    @property
    def seconds(self) -> float: ...

class Pool:
    """A pool opened for writing."""

    def __init__(self, directory: str, *, relaxed: bool, dense_interval: int, grow_log: bool, scratchpad_bytes: int, trust_after_reboot: bool, warm: bool = True, group: tuple[Callable[[tuple[int, int, int], Sequence[tuple[int, int, int]]], tuple[int, int, int]], Callable[[], None]] | None = None, synchronous: bool = False, dial: tuple[float, float, float, float, float, float, int, float, float, bool] | None = None, log_dial: tuple[float, float, float, float, float, float, int, float, float, bool] | None = None, scratchpad_nodes: Sequence[int] = [], victims: tuple[int, str, Sequence[int], tuple[float, float, float, float, float, float, int, float, float, bool] | None] | None = None) -> None:
        """
        warm: fill the scratchpad of a log store beside the first steps. group: of a pool that belongs to one. First asked, with the pool's newest step and the steps of its dense states, for the step that the group goes back to, each (step, cursor, row_updates); then called when that can be done, and waited for. Nothing is written before both have returned. synchronous: nothing is made durable beside training. dial: what the medium is made as slow as, in the order of DialSpec (core/media/dial.h); log_dial: the row log's, where it is another. scratchpad_nodes: NUMA nodes on which a scratchpad's rows lie; none: on any. victims: of the memory for rows that leave it: bytes, directory (empty: the machine's memory), nodes, and what it is made as slow as.
        """

    @staticmethod
    def create(directory: str, seed: int, log_bytes: int, tables: Sequence[TableSpec], log_store: bool = False, row_checksums: bool = False, begin: tuple[int, int, int] = (0, 0, 0), num_shards: int = 0, owned: Sequence[int] = [], group_uuid: bytes = ..., adopt: bool = False, format_version: int = 5, log_directory: str = '') -> None:
        """
        begin: step, cursor and row_updates at whose end the pool is made. num_shards: of the pool of which this is one writer's; the shards that it owns are beside it, two levels up, made here or, with adopt, there already. group_uuid: of the group of which this is a part. format_version: an older one, for a group whose other parts are of that. log_directory: of a row log that lies on a medium of its own.
        """

    @staticmethod
    def take_back(directory: str) -> None:
        """
        Lets a pool in which nothing was ever done be made anew. Raises PoolExists where something was.
        """

    @property
    def dial_counts(self) -> dict[str, float] | None:
        """
        What was asked of a dialled medium since the pool was opened; None where it is as it is.
        """

    @property
    def recovery(self) -> RecoveryReport: ...

    @property
    def tables(self) -> list[TableSpec]: ...

    @property
    def header(self) -> dict: ...

    @property
    def owned(self) -> list[int]:
        """The shards of this writer; none where the pool has no other."""

    @property
    def group_uuid(self) -> bytes | None:
        """Of the pool of which this is one writer's."""

    @property
    def medium(self) -> str: ...

    @property
    def level(self) -> str: ...

    def collection(self, tables: Sequence[int], features: Sequence[tuple[str, int]]) -> Collection:
        """features: (name, index into tables), in the order of the output."""

    def take_keys(self, former: Pool) -> None:
        """
        Of a pool in whose place this one was made, with more tables: its collections plan for this one.
        """

    def dense_state(self) -> tuple[bytes, bytes] | None: ...

    def announce(self, plan: Plan) -> None:
        """
        The plan is going to be captured, after those announced before: its rows are fetched ahead.
        """

    def capture(self, plan: Plan) -> Capture: ...

    def capture_ahead(self, plan: Plan) -> bool: ...

    def lookup(self, capture: Capture, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None: ...

    def evaluate(self, plan: Plan, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None: ...

    def lookup_ahead(self, next: Plan, now: Plan, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        Pools the next batch from its rows that `now` does not have, the only plan of the current step; before the update. lookup_rest adds the others.
        """

    def lookup_rest(self, capture: Capture, now: Plan, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        Adds the rows that `now` has, to the out that lookup_ahead filled for the capture's plan and `now`.
        """

    def expect_keys(self, plan: Plan) -> None:
        """
        The plan's keys keep their rows for some steps, until it is captured. Raises StepError where they lost them.
        """

    def oldest_keys(self, table: int) -> list[int]:
        """
        Of a table with keys: in the next step, records of steps before this do not count. Of each of its shards, where max_keys has them count for themselves; else one for all.
        """

    def read_missing(self, admission: Admission, weights: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], state: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """
        The rows that the admission found missing, in order, as they are at the end of the newest committed step: weights uint8 [num_missing * row bytes], state float32 [num_missing * state_floats]. Raises ConfigError.
        """

    def scale_gradients(self, capture: Capture, feature: int, grad: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None: ...

    def sum_gradients(self, gradients: Sequence[tuple[Capture, Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]]]) -> SummedGradients: ...

    def update(self, gradients: Sequence[tuple[Capture, Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]]], *, learning_rate: float, epsilon: float, beta1: float, beta2: float, weight_decay: float, gradient_scale: float) -> None: ...

    def update_summed(self, gradients: SummedGradients, *, learning_rate: float, epsilon: float, beta1: float, beta2: float, weight_decay: float, gradient_scale: float) -> None: ...

    def put(self, parts: Sequence[tuple[Capture, Sequence[int], Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)]]]) -> None:
        """
        An update whose new rows were computed elsewhere. Each part: a capture of this step, the tables of its collection (indexes, ascending) that the part has, their weights uint8 [sum of num_unique * row bytes] and state float32 [sum of num_unique * state_floats], compact in the capture's order, table after table. The parts of a capture have each of its tables once. Raises ConfigError, StepError.
        """

    def mapping(self, table: int) -> tuple[int, int, list[tuple[int, int]]] | None:
        """
        Where a table's rows are in memory until the pool is closed: the addresses of weights and of state (0: there is none), row after row, and address and bytes of each range of them that is there. None in a log store.
        """

    def materialize(self, plan: Plan) -> int:
        """
        Writes the initial values of the plan's rows that are untouched to their places in the mapping, and returns how many there were. They stay untouched. Raises PoolFull, ConfigError.
        """

    @property
    def dense_due(self) -> bool: ...

    def commit(self, cursor: int, structure: bytes | None, tensors: Sequence[tuple[int, int, int]], tensors_bytes: int) -> int:
        """
        tensors: (address, bytes, offset) of contiguous CPU tensors, in order of offset.
        """

    def commit_dense(self, mark: tuple[int, int, int], structure: bytes, tensors: Sequence[tuple[int, int, int]], tensors_bytes: int) -> None:
        """
        Of a pool without tables: commits (step, cursor, row_updates) with its dense state.
        """

    def note_group_durable(self, step: int) -> None:
        """
        No pool of the group goes back below this step: the log gives up what led there.
        """

    def empty_log(self) -> None:
        """After that: whatever the log still holds goes home."""

    @property
    def log_is_low(self) -> bool:
        """Is there room for few more steps?"""

    def write_dense(self, structure: bytes, tensors: Sequence[tuple[int, int, int]], tensors_bytes: int) -> None: ...

    @overload
    def import_rows(self, table: int, first: int, weights: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], state: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')] | None) -> None: ...

    @overload
    def import_rows(self, table: int, rows: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], weights: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], state: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')] | None) -> None: ...

    def import_values(self, table: int, rows: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        Rows of a new pool; values: of each its weights, and behind them its state.
        """

    def keep_rows(self, table: int, rows: Sequence[int]) -> None:
        """
        These rows, ascending, stay in the scratchpad for good, where there is one: a static cache.
        """

    def end_steps(self) -> None:
        """
        No further step follows the one under way: commits are not held up for the sake of later ones any more. From any thread.
        """

    def go_on(self, group: tuple[Callable[[tuple[int, int, int], Sequence[tuple[int, int, int]]], tuple[int, int, int]], Callable[[], None]]) -> None:
        """
        Goes on in another group, as if the pool had been opened in it, without closing it. What was not committed is taken back; collections are made anew. `recovery` says then what that took. Raises what opening raises.
        """

    def flush(self) -> None: ...

    def close(self) -> None: ...

    @property
    def is_inherited(self) -> bool:
        """
        Whether this process is a fork of the one that opened the pool: then verbs raise StepError and close does nothing.
        """

    @property
    def step(self) -> int: ...

    @property
    def cursor(self) -> int: ...

    @property
    def row_updates(self) -> int: ...

    @property
    def durable_step(self) -> int: ...

    @property
    def rows_durable_step(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def log_bytes(self) -> int: ...

    @property
    def log_bytes_free(self) -> int: ...

    def traffic(self) -> dict | None:
        """
        Rows and bytes since the pool was opened; None where rows are read and written in place.
        """

    def key_counts(self) -> dict | None:
        """
        What became of keys since the pool was opened; None where all of them train and stay.
        """

    def take_spans(self) -> list[tuple[str, str, float, float]]:
        """
        (stage, thread, began, ended) of what ran beside training and ended since the last call, in seconds of time.perf_counter; the newest 4096.
        """

def header_in(directory: str) -> dict:
    """
    What the pool in this directory says of itself: its header. Reads nothing else.
    """

def part_in(directory: str) -> tuple[bytes, list[int]] | None:
    """
    Which group's pool the one in this directory is a part of, and its shards: (group_uuid, owned). Reads nothing else.
    """

class Reader:
    """A pool seen without a lock and without changing it."""

    def __init__(self, directory: str) -> None: ...

    @property
    def header(self) -> dict: ...

    @property
    def owned(self) -> list[int]:
        """The shards of this writer; none where the pool has no other."""

    @property
    def group_uuid(self) -> bytes | None:
        """Of the pool of which this is one writer's."""

    @property
    def tables(self) -> list[TableSpec]: ...

    @property
    def medium(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    @property
    def clean(self) -> bool: ...

    @property
    def commit(self) -> dict: ...

    @property
    def unfinished_return(self) -> int | None:
        """
        The step to which rows in place were on their way back when a writer died: those of later steps may be of either. None where there is none.
        """

    @property
    def log_bytes_used(self) -> int:
        """What of the log is needed: by recovery, and in a log store by readers."""

    @property
    def merged_step(self) -> int | None:
        """Of a log store: its homes have the rows of this step at the latest."""

    def dense_state(self, last: int | None = None) -> tuple[int, bytes, bytes] | None:
        """
        The newest one, of steps up to `last`: its step, structure and tensors.
        """

    def dense_marks(self) -> list[tuple[int, int, int]]:
        """Step, cursor and row_updates of all dense states that hold."""

    def collection(self, tables: Sequence[int], features: Sequence[tuple[str, int]]) -> Collection: ...

    def evaluate(self, plan: Plan, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None: ...

    def touched_rows(self, table: int, first: int, count: int) -> list[int]: ...

    def gather_rows(self, table: int, rows: Sequence[int], weights: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], state: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], differs: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None: ...

    def read_rows(self, table: int, first: int, count: int, weights: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], state: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None: ...

    def initial_rows(self, table: int, rows: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], weights: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """The weights that rows have before any update."""

    def verify(self, step: int | None = None) -> list[str]:
        """
        step: where the pool goes back to when it is opened, where a group says that.
        """

class LiveCopy:
    """The rows of a pool at the end of one step, while a writer goes on."""

    def __init__(self, directory: str, part: bool = False) -> None:
        """part: of a pool of several writers, all of which are copied together."""

    @property
    def header(self) -> dict: ...

    @property
    def tables(self) -> list[TableSpec]: ...

    @property
    def fixes_first(self) -> bool:
        """Whether fix comes before the rows, or after them."""

    @property
    def rows_ascend(self) -> bool:
        """Whether copy_rows gives rows in order of their numbers."""

    @property
    def newest_dense_step(self) -> int | None: ...

    def fix(self) -> tuple[int, int, int, tuple[bytes, bytes] | None]:
        """
        Decides on the step: step, cursor, row_updates, and structure and tensors of the dense state.
        """

    def newest_step(self) -> int:
        """Of a part: the newest committed step."""

    def raise_floor(self, floor: int) -> None:
        """Of a part: the step is not going to be below `floor`."""

    def fix_at(self, step: int) -> None:
        """Of a part: decides on a step that all parts have committed."""

    def copy_rows(self, table: int, first: int, rows: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu')], values: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> tuple[int, int]:
        """
        Touched rows from place `first` on as they lie in the pool, as many as there is room for, of each its weights and behind them its state: how many, and where to go on.
        """

    def initial_rows(self, table: int, rows: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], weights: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """The weights that rows have before any update."""

    @property
    def fixed_record(self) -> tuple[int, int] | None:
        """
        After fix: position and checksum of the newest record of a step up to it, where there is a row log.
        """

    def log_goes_on_from(self, record: tuple[int, int]) -> bool:
        """
        Whether everything that was written since that record was in the log when this began, so that corrections have it.
        """

    @property
    def home_rows(self) -> list[int] | None:
        """By table, how many rows homes have, where that is known."""

    def settle(self) -> None: ...

    def corrections(self, table: int, first: int, rows: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu')], values: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> tuple[int, int]:
        """
        After settle: rows that count instead of those that were copied, likewise.
        """

def plan_repair(directory: str) -> tuple[list[tuple[str, int, bytes, str]], list[str]]:
    """
    What of a damaged pool may be put right without a guess: (file, offset, bytes, why) of each edit, and what may not.
    """

def plan_label_repair(directory: str) -> tuple[list[tuple[str, int, bytes, str]], list[str]]:
    """
    The same of the labels of a pool's files, or of those of a part of a group.
    """

def plan_superblock_repair(directory: str) -> tuple[str, bytes, str] | None:
    """
    The superblock or its copy, whichever of the two is lost or does not hold, and can be made of the other: (name, bytes, why). Raises Corrupted, FormatMismatch where what it was cannot be told.
    """

class DialProbe:
    """Reads and writes a file of its own on a dialled medium."""

    def __init__(self, directory: str, name: str, bytes: int, *, block: bool, dial: tuple[float, float, float, float, float, float, int, float, float, bool]) -> None:
        """Makes the file, and writes it once; the caller removes it."""

    @property
    def unit_bytes(self) -> int:
        """What random pieces are multiples of."""

    def read_all(self) -> None:
        """All of the file, in long runs."""

    def write_all(self) -> None: ...

    def sync(self) -> None: ...

    def read_at_random(self, count: int, bytes_each: int) -> None:
        """As many at a time as the medium takes."""

    def write_at_random(self, count: int, bytes_each: int) -> None: ...

    def read_one_by_one(self, count: int, bytes_each: int) -> None:
        """Each begins when the one before has come."""

def crc32c(crc: int, data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """
    The CRC-32C of the bytes that gave `crc`, followed by these; begin with 0.
    """

def text_keys(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], starts: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], keys: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """
    The keys of the texts data[starts[i] : starts[i] + lengths[i]]: XXH64 with the seed 0.
    """

def all_finite(values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> bool:
    """Whether no element is infinite or a NaN."""

def first_non_finite(tensors: Sequence[tuple[int, int, int]]) -> int | None:
    """
    tensors: (address, bytes, format) of contiguous ones, format 0 for float16, 1 bfloat16, 2 float32, 3 float64. The index of the first that has an infinity or a NaN; None where all are finite.
    """

def check_nodes(nodes: Sequence[int], option: str = 'scratchpad_nodes') -> None:
    """
    Raises ConfigError where the system has no memory on one of these NUMA nodes.
    """

def remove_row_log(path: str) -> None:
    """
    Removes a pool's row log: where it is a link, what it leads to as well.
    """

def row_log_path(directory: str) -> str:
    """
    Where the row log of the pool there is, or is going to be made: a link may lead elsewhere.
    """

def is_block_medium(directory: str) -> bool:
    """
    Whether files of the directory lie neither on DAX memory nor in volatile memory.
    """

def places_of(num_rows: int, num_shards: int, first_shard: int, rows: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
    """The places of rows of a table that is split over so many shards."""

def rows_of_places(num_rows: int, num_shards: int, first_shard: int, places: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
    """The other way; a place without a row gives a number beyond the table."""

def shards_of_keys(pool_seed: int, table: int, num_shards: int, keys: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
    """
    The shards of keys of table number `table`, where it is split over so many.
    """

def first_admissions(spec: TableSpec, pool_seed: int, table: int, keys: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
    """
    Of keys of table number `table`: how many steps have to bring each before it is trained, that one among them.
    """

def living_keys(spec: TableSpec, pool_seed: int, table: int, step: int, records: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.bool_], dict(shape=(None,))]:
    """
    Of all records that rows of table number `table` have, uint8 [n, 16]: which count at the end of `step`.
    """

def pool_parts(directory: str) -> list[str]:
    """
    The files of pools in a directory, by their names from there, without those that publish one.
    """

def is_unpublished(directory: str) -> bool:
    """
    Whether a pool is being made in the directory, or was when the maker died: what lies there may be removed.
    """

def mark_unpublished(directory: str) -> None:
    """Durably says so; before the first file of a pool is made there."""

def mark_published(directory: str) -> None:
    """
    Durably takes that back: once the pool is published, and before anything else is written to it.
    """

def remove_unpublished_parts(directory: str) -> None:
    """
    Removes the files of pools in the directory. Raises Corrupted where they do not lie beside a mark.
    """

def ascending_order(rows: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], order: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """Which of the rows is the first by number, which the second, and so on."""

def take_values(values: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], order: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """Copies the lines of `values` that `order` names into those of `out`."""

def set_num_threads(num_threads: int) -> None: ...

def suggest_num_threads(num_threads: int) -> None:
    """The same, unless that was called."""

def num_threads() -> int: ...

def instruction_set() -> str: ...

def kill_at_persist_point(n: int) -> None:
    """
    Kills this process with SIGKILL at its n-th persist point from now (0: never). For crash tests.
    """

def persist_points_left() -> int: ...
