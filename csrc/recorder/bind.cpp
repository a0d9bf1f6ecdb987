// Bindings of the recorder: records from tensors, and the constants of records.
#include "base/bind.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <cstring>
#include <mutex>

#include "operations/tensor.hpp"
#include "recorder/recorder.hpp"

namespace unicomm {
namespace {

void add_side(nb::handle tensors, uint64_t& numel, uint16_t& n, uint8_t& dtype, uint8_t& ndim,
              int64_t* dims) {
    PyObject* seq = tensors.ptr();
    Py_ssize_t count = PyList_Check(seq) ? list_size(seq) : tuple_size(seq);
    n = static_cast<uint16_t>(count < 65535 ? count : 65535);
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* item = PyList_Check(seq) ? list_item(seq, i) : tuple_item(seq, i);
        Tensor t;
        if (!read_tensor(item, t)) {
            PyErr_Clear();  // a tensor that cannot be read must not make the operation fail
            continue;
        }
        describe(t, i == 0, numel, dtype, ndim, dims);
    }
}

uint64_t begin(Recorder& r, uint16_t comm, uint16_t op, uint64_t seq, uint64_t op_id, nb::handle inputs,
               nb::handle outputs, uint8_t red, int peer, uint16_t flags, double timeout, uint64_t batch,
               bool start_now) {
    ring::NewRecord n;
    n.comm = comm;
    n.op = op;
    n.seq = seq;
    n.op_id = op_id;
    n.red = red;
    n.peer = peer;
    n.flags = flags;
    n.timeout_ms = ring::timeout_ms(timeout);
    n.batch = batch;
    n.start_now = start_now;
    add_side(inputs, n.in_numel, n.n_in, n.in_dtype, n.in_ndim, n.in_dims);
    add_side(outputs, n.out_numel, n.n_out, n.out_dtype, n.out_ndim, n.out_dims);
    return r.begin(n);
}

nb::bytes shape(Recorder& r, uint64_t id) {
    ring::NewRecord n;
    if (!r.writer.shape(id, n)) return nb::bytes("", 0);
    return nb::bytes(reinterpret_cast<const char*>(&n), sizeof n);
}

uint64_t begin_again(Recorder& r, const nb::bytes& shape, uint64_t seq, uint64_t op_id, uint16_t flags) {
    ring::NewRecord n;
    if (shape.size() != sizeof n) return 0;
    std::memcpy(&n, shape.c_str(), sizeof n);
    n.seq = seq;
    n.op_id = op_id;
    n.flags = flags;
    n.start_now = false;
    return r.writer.begin(n);
}

// What unicomm/comms/operations/recording.py passes to a Recorder. The readers of rings import no core: a
// test compares theirs with these.
void export_constants(nb::module_& m) {
    m.attr("RECORD_CREATED") = int(ring::State::kCreated);
    m.attr("RECORD_STARTED") = int(ring::State::kStarted);
    m.attr("RECORD_COMPLETED") = int(ring::State::kCompleted);
    m.attr("RECORD_FAILED") = int(ring::State::kFailed);
    m.attr("RECORD_ASYNC") = int(ring::kAsync);
    m.attr("RECORD_P2P") = int(ring::kP2P);
    m.attr("RECORD_BATCH") = int(ring::kBatch);
    m.attr("RECORD_RECEIVE") = int(ring::kReceive);
    m.attr("RECORD_CAPTURED") = int(ring::kCaptured);
    m.attr("RECORD_REPLAYED") = int(ring::kReplayed);
    m.attr("RECORD_REPLAY") = int(ring::kReplay);
    m.attr("RECORD_INPUT_CHECKSUM") = int(ring::kInputChecksum);
    m.attr("RECORD_OUTPUT_CHECKSUM") = int(ring::kOutputChecksum);
    m.attr("RECORD_COMPARED") = int(ring::kCompared);
    m.attr("RECORD_ENCODED") = int(ring::kEncoded);
    m.attr("RECORD_FROM_ANY") = int(ring::kFromAny);
    m.attr("RECORD_OTHER_ERROR") = ring::kOtherError;
    m.attr("COMM_OPEN") = int(ring::kOpen);
    m.attr("COMM_FINALIZED") = int(ring::kFinalized);
    m.attr("COMM_FAILED") = int(ring::kFailed);
    m.def(
        "ring_layout",
        [] {
            nb::dict d;
            d["header"] = sizeof(ring::Header);
            d["comm"] = sizeof(ring::Comm);
            d["frame"] = sizeof(ring::Frame);
            d["record"] = sizeof(ring::Record);
            d["header.comm_off"] = offsetof(ring::Header, comm_off);
            d["header.rec_next"] = offsetof(ring::Header, rec_next);
            d["header.rec_skipped"] = offsetof(ring::Header, rec_skipped);
            d["comm.coll_created"] = offsetof(ring::Comm, coll_created);
            d["frame.caller"] = offsetof(ring::Frame, caller);
            d["frame.whose"] = offsetof(ring::Frame, whose);
            d["record.input_checksum"] = offsetof(ring::Record, input_checksum);
            d["record.output_checksum"] = offsetof(ring::Record, output_checksum);
            d["record.comm"] = offsetof(ring::Record, comm);
            d["record.in_numel"] = offsetof(ring::Record, in_numel);
            d["record.in_dims"] = offsetof(ring::Record, in_dims);
            d["record.error"] = offsetof(ring::Record, error);
            d["record.sent"] = offsetof(ring::Record, sent);
            return d;
        },
        nb::sig("def ring_layout() -> dict[str, int]"),
        "Sizes of the ring's structures and offsets of fields, for the test of the Python reader.");
}

}  // namespace

void bind_recorder(nb::module_& m) {
    nb::class_<Recorder>(m, "Recorder")
        .def(
            "__init__",
            [](Recorder* self, const std::string& path, const std::string& meta, int rank, int world,
               uint32_t records) {
                new (self) Recorder(path, meta, rank, world, records);
                static std::once_flag once;
                std::call_once(once, [] { pthread_atfork(nullptr, nullptr, &Recorder::detach_after_fork); });
                self->make_current();
            },
            nb::arg("path"), nb::arg("meta"), nb::arg("rank"), nb::arg("world"), nb::arg("records"))
        .def(
            "add_comm",
            [](Recorder& r, const std::string& name, const std::string& backend, const std::string& uid,
               const std::string& ranks, int rank,
               int size) { return r.writer.add_comm(name, backend, uid, ranks, rank, size); },
            nb::arg("name"), nb::arg("backend"), nb::arg("uid"), nb::arg("ranks"), nb::arg("rank"),
            nb::arg("size"))
        .def(
            "set_comm_state",
            [](Recorder& r, uint16_t comm, uint32_t state, const std::string& uid) {
                r.writer.set_comm_state(comm, static_cast<ring::CommState>(state), uid);
            },
            nb::arg("comm"), nb::arg("state"), nb::arg("uid"))
        .def("begin", &begin, nb::arg("comm"), nb::arg("op"), nb::arg("seq"), nb::arg("op_id"),
             nb::arg("inputs"), nb::arg("outputs"), nb::arg("red") = 0, nb::arg("peer") = -1,
             nb::arg("flags") = 0, nb::arg("timeout") = 0.0, nb::arg("batch") = 0,
             nb::arg("start_now") = true,
             nb::sig("def begin(self, comm: int, op: int, seq: int, op_id: int, inputs: Sequence[Tensor], "
                     "outputs: Sequence[Tensor], red: int = 0, peer: int = -1, flags: int = 0, "
                     "timeout: float = 0.0, batch: int = 0, start_now: bool = True) -> int"),
             "Begins a record and returns its id.")
        .def(
            "add_flags", [](Recorder& r, uint64_t id, uint16_t flags) { r.writer.add_flags(id, flags); },
            nb::sig("def add_flags(self, id: int, flags: int, /) -> None"))
        .def(
            "set_sender",
            [](Recorder& r, uint64_t id, int32_t peer, uint64_t seq) { r.writer.set_sender(id, peer, seq); },
            nb::sig("def set_sender(self, id: int, peer: int, seq: int, /) -> None"),
            "Sets the sender of a receive from any rank, by its rank in the communicator, and its number.")
        .def(
            "add_checksum",
            [](Recorder& r, uint64_t id, uint16_t which, uint64_t checksum) {
                r.writer.add_checksum(id, static_cast<ring::RecordFlags>(which), checksum);
            },
            nb::sig("def add_checksum(self, id: int, which: int, checksum: int, /) -> None"),
            "Sets the checksum of the inputs (RECORD_INPUT_CHECKSUM) or outputs (RECORD_OUTPUT_CHECKSUM).")
        .def(
            "add_sent", [](Recorder& r, uint64_t id, uint64_t bytes) { r.writer.add_sent(id, bytes); },
            nb::sig("def add_sent(self, id: int, bytes: int, /) -> None"),
            "Sets the bytes that this rank has sent of elements in a wire format.")
        .def(
            "place", [](Recorder& r, uint64_t id) { return r.writer.place(id); },
            nb::sig("def place(self, id: int, /) -> str"),
            "The user's line that a record was called from, as file:line; empty if it is unknown.")
        .def("shape", &shape, nb::sig("def shape(self, id: int, /) -> bytes"),
             "A record without its numbers, for `begin_again`; empty if it was overwritten.")
        .def("begin_again", &begin_again,
             nb::sig("def begin_again(self, shape: bytes, seq: int, op_id: int, flags: int, /) -> int"))
        .def(
            "start", [](Recorder& r, uint64_t id, uint64_t ago_ns) { r.writer.start(id, ago_ns); },
            nb::arg("id"), nb::arg("ago_ns") = 0)
        .def(
            "finish",
            [](Recorder& r, uint64_t id, uint8_t state, uint32_t error, uint64_t ago_ns) {
                r.writer.finish(id, static_cast<ring::State>(state), error, ago_ns);
            },
            nb::arg("id"), nb::arg("state") = static_cast<uint8_t>(ring::State::kCompleted),
            nb::arg("error") = 0, nb::arg("ago_ns") = 0)
        .def(
            "close", [](Recorder& r, bool remove) { r.writer.close(remove); }, nb::arg("remove"))
        .def("snapshot",
             [](Recorder& r) {
                 auto [data, bytes] = r.writer.memory();
                 nb::bytes copy(data, bytes);
                 // Readers tell by it which records may have been overwritten in the meantime.
                 uint64_t begun = r.writer.header().rec_next.load();
                 std::memcpy(PyBytes_AS_STRING(copy.ptr()) + offsetof(ring::Header, rec_next), &begun,
                             sizeof begun);
                 return copy;
             })
        .def(
            "total", [](Recorder& r) { return r.writer.total(); }, "The number of records ever begun.")
        .def_prop_ro("path", [](Recorder& r) { return r.writer.path(); });

    m.def(
        "set_libraries",
        [](std::string own, std::string torch, std::string stdlib, std::vector<std::string> torch_wrappers,
           std::vector<std::string> wrappers) {
            CallPaths::set_libraries({std::move(own), std::move(torch), std::move(stdlib),
                                      std::move(torch_wrappers), std::move(wrappers)});
        },
        nb::arg("own"), nb::arg("torch") = "", nb::arg("stdlib") = "",
        nb::arg("torch_wrappers") = std::vector<std::string>(),
        nb::arg("wrappers") = std::vector<std::string>(),
        nb::sig("def set_libraries(own: str, torch: str = '', stdlib: str = '', "
                "torch_wrappers: Sequence[str] = (), wrappers: Sequence[str] = ()) -> None"),
        "Folders whose files are not the user's, which end with a slash; folders in torch's, and installed "
        "packages, that wrap the user's code. Call paths that are known already keep their frames.");
    m.def("next_op_id", &next_op_id);
    export_constants(m);
}

}  // namespace unicomm
