// Python's side of the shared-memory transport. Tensors arrive validated; the GIL is released while an
// operation waits.
#include "core/bind.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/syscall.h>

#include <utility>

#include "shm/bind_fault.hpp"
#include "shm/dispatch.hpp"
#include "shm/heap.hpp"
#include "shm/p2p.hpp"

namespace unicomm {
namespace {

using shm::cuts_input;
using shm::cuts_output;
using shm::deadline_after;
using shm::dispatch;
using shm::equal_parts;
using shm::Exchange;
using shm::Group;
using shm::Heap;
using shm::Message;
using shm::Op;
using shm::Piece;
using shm::piece_of;
using shm::Segment;

std::vector<Tensor> read_all(nb::list tensors) {
    std::vector<Tensor> out(tensors.size());
    for (size_t i = 0; i < out.size(); ++i) {
        if (!read_tensor(tensors[i].ptr(), out[i])) throw nb::python_error();
    }
    return out;
}

// The parts for each rank: one tensor each, or one tensor cut by rows or into equal parts.
std::vector<Piece> pieces_of(const std::vector<Tensor>& tensors, nb::handle splits, int world) {
    std::vector<Piece> out;
    if (tensors.size() != 1 || (world == 1 && splits.is_none())) {
        for (const Tensor& t : tensors) out.push_back(piece_of(t));
        return out;
    }
    const Tensor& t = tensors[0];
    if (splits.is_none()) return equal_parts(t, world);
    char* at = static_cast<char*>(t.data);
    uint64_t rows = t.ndim > 0 ? static_cast<uint64_t>(t.shape[0]) : 1;
    uint64_t row = rows ? static_cast<uint64_t>(t.bytes) / rows : 0;
    for (nb::handle h : splits) {
        uint64_t bytes = nb::cast<uint64_t>(h) * row;
        out.push_back({at, bytes});
        at += bytes;
    }
    return out;
}

nb::object run(Group& g, uint32_t code, int dtype, int red, double factor, int root, uint64_t count,
               uint64_t extra, double timeout, nb::list inputs, nb::list outputs, nb::object in_splits,
               nb::object out_splits) {
    Op op;
    op.code = code;
    op.dtype = static_cast<DType>(dtype);
    op.red = static_cast<Red>(red);
    op.factor = factor;
    op.root = root;
    op.count = count;
    op.extra = extra;
    op.deadline_ns = deadline_after(timeout);
    auto in_tensors = read_all(inputs), out_tensors = read_all(outputs);
    auto oc = static_cast<OpCode>(code);
    auto ins = pieces_of(in_tensors, in_splits, cuts_input(oc) ? g.world() : 1);
    auto outs = pieces_of(out_tensors, out_splits, cuts_output(oc) ? g.world() : 1);
    uint64_t elements = in_tensors.empty() ? 0 : static_cast<uint64_t>(in_tensors[0].numel);
    Fault fault;
    {
        GilReleased release;
        std::lock_guard lock(g.running());
        fault = dispatch(g, op, ins, outs, elements);
    }
    return fault_tuple(fault);
}

// messages: list of (is_send, peer, tensor)
std::vector<Message> read_messages(nb::list messages) {
    std::vector<Message> list;
    for (nb::handle h : messages) {
        auto item = nb::cast<nb::tuple>(h);
        Tensor t;
        if (!read_tensor(item[2].ptr(), t)) throw nb::python_error();
        list.push_back({nb::cast<bool>(item[0]), nb::cast<int>(item[1]), piece_of(t), t.dtype,
                        static_cast<uint64_t>(t.numel)});
    }
    return list;
}

// What a signal's handler raised (KeyboardInterrupt) while this thread waited. The wait ends by it, and the
// operation raises it.
struct Interruption {
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    void keep() {  // the first one
        if (type) return PyErr_Clear();
        PyErr_Fetch(&type, &value, &trace);
    }
    void raise() {
        restore();
        throw nb::python_error();
    }
    // What was waited for has come all the same: the operation is right, and the program hears of it after.
    void raise_later() {
        PyErr_NormalizeException(&type, &value, &trace);
        auto raise = [](void* error) {
            nb::object that = nb::steal(static_cast<PyObject*>(error));
            PyErr_SetObject(that.type().ptr(), that.ptr());
            return -1;
        };
        Py_XINCREF(value);
        if (value && Py_AddPendingCall(raise, value) != 0) Py_DECREF(value);
        restore();
        PyErr_Clear();
    }

  private:
    void restore() {
        PyErr_Restore(std::exchange(type, nullptr), std::exchange(value, nullptr),
                      std::exchange(trace, nullptr));
    }
};
thread_local Interruption interruption;

// Python runs handlers of signals in its main thread, which is the process's first one (in a child that was
// forked, the one that forked); in another one they are for nobody to run.
bool signal_has_raised() {
    if (syscall(SYS_gettid) != getpid() || !Py_IsInitialized()) return false;
    if (interruption.type) return true;
    PyGILState_STATE lock;
    with_end_of_python([&] { lock = PyGILState_Ensure(); });
    with_end_of_python([&] {
        if (PyErr_CheckSignals() != 0) interruption.keep();
    });
    PyGILState_Release(lock);
    return interruption.type != nullptr;
}

bool ask(nb::handle look, uint64_t comm, int rank, const std::vector<uint64_t>& threads,
         std::vector<uint64_t>& matter) {
    try {
        nb::object answer = look(comm, rank, threads);
        if (answer.is_none()) return false;
        matter = nb::cast<std::vector<uint64_t>>(answer);
        return true;
    } catch (nb::python_error& error) {
        if (error.matches(PyExc_Exception)) {
            error.discard_as_unraisable("unicomm's look at the threads");
        } else {
            error.restore();
            interruption.keep();
        }
    } catch (const std::exception&) {
    }
    return false;
}

// `look(comm, rank, threads)` returns the threads that matter, or None where another one may enter (see
// shm/deadlock.hpp). It is called by whatever thread waits, while the interpreter lives.
void set_census(nb::object look) {
    static nb::object* kept = nullptr;  // never destroyed: threads may wait until the process has ended
    if (!kept) kept = new nb::object();
    *kept = std::move(look);
    shm::set_census(
        [](uint64_t comm, int rank, const std::vector<uint64_t>& threads, std::vector<uint64_t>& matter) {
            if (!Py_IsInitialized()) return false;
            PyGILState_STATE lock;
            with_end_of_python([&] { lock = PyGILState_Ensure(); });
            bool bound = false;
            with_end_of_python([&] { bound = ask(*kept, comm, rank, threads, matter); });
            PyGILState_Release(lock);
            return bound;
        });
}

nb::object exchange(Group& g, nb::list messages, double timeout) {
    std::vector<Message> list = read_messages(messages);
    uint64_t deadline = deadline_after(timeout);
    Fault fault;
    {
        GilReleased release;
        std::lock_guard lock(g.running());
        fault = g.exchange(list, deadline);
    }
    return fault_tuple(fault);
}

// Runs until something happens: a fault, or a list of (index, peer, fault).
nb::object run_exchange(Exchange& e, Group& g, double timeout, double limit) {
    uint64_t deadline = deadline_after(timeout), back = deadline_after(limit);
    std::vector<Exchange::Done> done;
    Fault fault;
    {
        GilReleased release;
        std::lock_guard lock(g.running());
        fault = e.run(deadline, back, done);
    }
    if (fault) return fault_tuple(fault);
    nb::list out;
    for (const Exchange::Done& d : done) out.append(nb::make_tuple(d.index, d.peer, fault_tuple(d.fault)));
    return out;
}

}  // namespace

void raise_late_signals() {
    if (interruption.type) interruption.raise_later();
}

nb::object fault_tuple(const Fault& f) {
    if (!f) {
        raise_late_signals();
        return nb::none();
    }
    if (interruption.type) interruption.raise();
    nb::list claims;
    for (const Claim& c : f.claims) {
        claims.append(nb::make_tuple(c.rank, c.op, c.dtype, c.red, c.root, c.count, c.extra));
    }
    // Names that others wrote, of which the end or the beginning may have been cut off within a character.
    auto detail = nb::steal(PyUnicode_DecodeUTF8(f.detail.data(), Py_ssize_t(f.detail.size()), "replace"));
    if (!detail.is_valid()) throw nb::python_error();
    return nb::make_tuple(static_cast<int>(f.code), nb::cast(f.culprits), claims, detail);
}

void bind_shm(nb::module_& m) {
    nb::class_<Segment>(m, "ShmSegment")
        .def(nb::init<int, uint32_t, uint32_t>(), nb::arg("world"), nb::arg("slot_bytes"),
             nb::arg("p2p_bytes"))
        .def_static("open", [](int pid, int fd) { return std::make_shared<Segment>(pid, fd); })
        .def("close_fd", &Segment::close_fd)
        .def_prop_ro("fd", &Segment::fd)
        .def_prop_ro("bytes", [](Segment& s) { return s.layout().bytes; });
    nb::class_<Group>(m, "ShmGroup")
        .def(
            "__init__",
            [](Group* self, std::shared_ptr<Segment> segment, int rank, const std::vector<int>& pids,
               const std::string& name) { new (self) Group(std::move(segment), rank, pids, name); },
            nb::arg("segment"), nb::arg("rank"), nb::arg("pids"), nb::arg("name") = "")
        .def("run", &run, nb::arg("code"), nb::arg("dtype"), nb::arg("red"), nb::arg("factor"),
             nb::arg("root"), nb::arg("count"), nb::arg("extra"), nb::arg("timeout"), nb::arg("inputs"),
             nb::arg("outputs"), nb::arg("in_splits").none(), nb::arg("out_splits").none())
        .def("exchange", &exchange, nb::arg("messages"), nb::arg("timeout"))
        .def("abort", &Group::abort, nb::call_guard<GilReleased>())
        .def("expect_slow", &Group::expect_slow, nb::arg("seconds"))
        .def("finalize", &Group::finalize)
        .def("lost", [](Group& g, const std::vector<int>& ranks) { return fault_tuple(g.lost(ranks)); })
        .def("dead_ranks", &Group::dead_ranks)
        .def("failed", [](Group& g) { return g.segment().header().failures.load() > 0; })
        .def_prop_ro("direct_operations", &Group::direct_operations)
        .def_prop_ro("id", [](Group& g) { return g.segment().id(); })
        .def_prop_ro("bytes", [](Group& g) { return g.segment().layout().bytes; });
    nb::class_<Exchange>(m, "ShmExchange")
        .def(nb::init<Group&>(), nb::arg("group"), nb::keep_alive<1, 2>())
        .def(
            "add",
            [](Exchange& e, nb::list messages) {
                for (const Message& m : read_messages(messages)) e.add(m);
            },
            nb::arg("messages"))
        .def("run", &run_exchange, nb::arg("group"), nb::arg("timeout"), nb::arg("limit"))
        .def("interrupt", &Exchange::interrupt);
    // Memory of the process that ranks of this host can read: an array of bytes that holds it.
    m.def(
        "heap_allocate",
        [](uint64_t bytes) {
            void* data = Heap::mine().allocate(bytes);
            nb::capsule owner(data, [](void* p) noexcept { Heap::release(p); });
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {size_t(bytes)}, owner);
        },
        nb::arg("bytes"));
    m.def("heap_holds", [](uint64_t data, uint64_t bytes) {
        return Heap::holds(reinterpret_cast<const void*>(data), bytes);
    });
    m.def("heap_allocated", [] { return Heap::mine().allocated(); });
    m.def("set_census", &set_census, nb::arg("look"));
    shm::set_signal_check(&signal_has_raised);
    m.def("usable_cores", &shm::usable_cores);
    bind_fast(m);
}

}  // namespace unicomm
