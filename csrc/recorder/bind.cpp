// Python's side of the recorder: records from tensors, and the caller's file and line.
#include "core/bind.hpp"

#include <nanobind/stl/string.h>
#include <pthread.h>

#include <mutex>
#include <unordered_map>

#include "core/tensor.hpp"
#include "recorder/ring.hpp"

namespace unicomm {
namespace {

std::string own_folder;  // frames of files below it are ours, not the user's

struct CallSite {
    PyCodeObject* code;
    int lasti;
    bool operator==(const CallSite&) const = default;
};
struct CallSiteHash {
    size_t operator()(const CallSite& s) const {
        return std::hash<void*>()(s.code) * 31 + static_cast<size_t>(s.lasti);
    }
};

std::string_view text_of(PyObject* text) {
    Py_ssize_t n = 0;
    const char* s = text ? PyUnicode_AsUTF8AndSize(text, &n) : nullptr;
    if (!s) {
        PyErr_Clear();
        return "?";
    }
    return {s, static_cast<size_t>(n)};
}

PyObject* attribute(PyObject* object, const char* name) {
    PyObject* value = PyObject_GetAttrString(object, name);
    if (!value) PyErr_Clear();
    return value;
}

}  // namespace

class Recorder {
  public:
    Recorder(const std::string& path, const std::string& meta, int rank, int world, uint32_t records)
        : writer(path, meta, rank, world, records) {}

    // The innermost frame outside the package, interned once per call site. The GIL must be held.
    uint32_t caller_frame() {
        PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
        while (frame) {
            PyCodeObject* code = PyFrame_GetCode(frame);
            if (!is_own(code)) {
                uint32_t id = site(code, frame);
                Py_DECREF(code);
                Py_DECREF(frame);
                return id;
            }
            Py_DECREF(code);
            PyFrameObject* back = PyFrame_GetBack(frame);
            Py_DECREF(frame);
            frame = back;
        }
        return 0;
    }

    ~Recorder();

    ring::Writer writer;

  private:
    bool is_own(PyCodeObject* code) {
        auto found = own_.find(code);
        if (found != own_.end()) return found->second;
        PyObject* name = attribute(reinterpret_cast<PyObject*>(code), "co_filename");
        std::string_view file = text_of(name);
        bool own = file.starts_with(own_folder);
        own = own || file.starts_with("<frozen");  // runpy and importlib
        Py_XDECREF(name);
        Py_INCREF(code);  // the address is the key
        own_.emplace(code, own);
        return own;
    }

    uint32_t site(PyCodeObject* code, PyFrameObject* frame) {
        CallSite key{code, PyFrame_GetLasti(frame)};
        auto found = sites_.find(key);
        if (found != sites_.end()) return found->second;
        PyObject* file = attribute(reinterpret_cast<PyObject*>(code), "co_filename");
        PyObject* name = attribute(reinterpret_cast<PyObject*>(code), "co_qualname");
        if (!name) name = attribute(reinterpret_cast<PyObject*>(code), "co_name");
        uint32_t id = writer.add_frame(text_of(file), text_of(name),
                                       static_cast<uint32_t>(PyFrame_GetLineNumber(frame)));
        Py_XDECREF(file);
        Py_XDECREF(name);
        Py_INCREF(code);
        sites_.emplace(key, id);
        return id;
    }

    // Both are guarded by the GIL.
    std::unordered_map<PyCodeObject*, bool> own_;
    std::unordered_map<CallSite, uint32_t, CallSiteHash> sites_;
};

namespace {
Recorder* the_recorder = nullptr;  // for the fork handler
}

Recorder::~Recorder() {
    if (the_recorder == this) the_recorder = nullptr;
}

namespace {

void add_side(nb::handle tensors, uint64_t& numel, uint16_t& n, uint8_t& dtype, uint8_t& ndim, int64_t* dims) {
    PyObject* seq = tensors.ptr();
    Py_ssize_t count = PyList_Check(seq) ? PyList_GET_SIZE(seq) : PyTuple_GET_SIZE(seq);
    n = static_cast<uint16_t>(count < 65535 ? count : 65535);
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* item = PyList_Check(seq) ? PyList_GET_ITEM(seq, i) : PyTuple_GET_ITEM(seq, i);
        Tensor t;
        if (!read_tensor(item, t)) {
            PyErr_Clear();  // recording must not make an operation fail
            continue;
        }
        numel += static_cast<uint64_t>(t.numel);
        if (i == 0) {
            dtype = static_cast<uint8_t>(t.dtype);
            ndim = static_cast<uint8_t>(t.ndim < 255 ? t.ndim : 255);
            for (int d = 0; d < t.ndim && d < ring::kMaxDims; ++d) dims[d] = t.shape[d];
        }
    }
}

uint64_t begin(Recorder& r, uint16_t comm, uint16_t op, uint64_t seq, uint64_t op_id, nb::handle inputs,
               nb::handle outputs, uint8_t red, int peer, uint16_t flags, uint64_t signature,
               uint32_t timeout_ms, uint64_t batch, bool start_now) {
    ring::NewRecord n;
    n.comm = comm;
    n.op = op;
    n.seq = seq;
    n.op_id = op_id;
    n.red = red;
    n.peer = peer;
    n.flags = flags;
    n.signature = signature;
    n.timeout_ms = timeout_ms;
    n.batch = batch;
    n.start_now = start_now;
    n.frame = r.caller_frame();
    add_side(inputs, n.in_numel, n.n_in, n.in_dtype, n.in_ndim, n.in_dims);
    add_side(outputs, n.out_numel, n.n_out, n.out_dtype, n.out_ndim, n.out_dims);
    return r.writer.begin(n);
}

}  // namespace

void bind_recorder(nb::module_& m) {
    nb::class_<Recorder>(m, "Recorder")
        .def("__init__",
             [](Recorder* self, const std::string& path, const std::string& meta, int rank, int world,
                uint32_t records) {
                 new (self) Recorder(path, meta, rank, world, records);
                 static std::once_flag once;
                 std::call_once(once, [] {
                     pthread_atfork(nullptr, nullptr, [] {
                         if (the_recorder) the_recorder->writer.detach_after_fork();
                     });
                 });
                 the_recorder = self;
             },
             nb::arg("path"), nb::arg("meta"), nb::arg("rank"), nb::arg("world"), nb::arg("records"))
        .def("add_comm",
             [](Recorder& r, const std::string& name, const std::string& backend, const std::string& uid,
                const std::string& ranks, int rank,
                int size) { return r.writer.add_comm(name, backend, uid, ranks, rank, size); },
             nb::arg("name"), nb::arg("backend"), nb::arg("uid"), nb::arg("ranks"), nb::arg("rank"),
             nb::arg("size"))
        .def("set_comm_state",
             [](Recorder& r, uint16_t comm, uint32_t state) {
                 r.writer.set_comm_state(comm, static_cast<ring::CommState>(state));
             })
        .def("begin", &begin, nb::arg("comm"), nb::arg("op"), nb::arg("seq"), nb::arg("op_id"),
             nb::arg("inputs"), nb::arg("outputs"), nb::arg("red") = 0, nb::arg("peer") = -1,
             nb::arg("flags") = 0, nb::arg("signature") = 0, nb::arg("timeout_ms") = 0, nb::arg("batch") = 0,
             nb::arg("start_now") = true)
        .def("start", [](Recorder& r, uint64_t id) { r.writer.start(id); })
        .def("finish",
             [](Recorder& r, uint64_t id, uint8_t state, uint32_t error) {
                 r.writer.finish(id, static_cast<ring::State>(state), error);
             },
             nb::arg("id"), nb::arg("state") = static_cast<uint8_t>(ring::State::kCompleted),
             nb::arg("error") = 0)
        .def("close", [](Recorder& r, bool remove) { r.writer.close(remove); }, nb::arg("remove"))
        .def("snapshot",
             [](Recorder& r) {
                 auto [data, bytes] = r.writer.memory();
                 return nb::bytes(data, bytes);
             })
        .def("total", [](Recorder& r) { return r.writer.header().rec_next.load(); })
        .def_prop_ro("path", [](Recorder& r) { return r.writer.path(); });

    m.def("set_own_folder", [](const std::string& folder) { own_folder = folder; });
    // For the test that compares the two descriptions of the file.
    m.def("ring_layout", [] {
        nb::dict d;
        d["header"] = sizeof(ring::Header);
        d["comm"] = sizeof(ring::Comm);
        d["frame"] = sizeof(ring::Frame);
        d["record"] = sizeof(ring::Record);
        d["header.comm_off"] = offsetof(ring::Header, comm_off);
        d["header.rec_next"] = offsetof(ring::Header, rec_next);
        d["comm.coll_created"] = offsetof(ring::Comm, coll_created);
        d["record.comm"] = offsetof(ring::Record, comm);
        d["record.in_numel"] = offsetof(ring::Record, in_numel);
        d["record.in_dims"] = offsetof(ring::Record, in_dims);
        d["record.error"] = offsetof(ring::Record, error);
        return d;
    });
}

}  // namespace unicomm
