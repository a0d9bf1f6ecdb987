// What fast paths have in common: which calls are for them, tensors read without a look at Python's types, a
// record of what runs.
//
// A fast path takes only what is common: exact tensors on the CPU, no hints, nothing pending or running, no
// hooks. For anything else, also for anything wrong, it returns False before it did anything, and the general
// path takes over, with its errors.
#pragma once
#include <algorithm>
#include <atomic>

#include "core/bind.hpp"
#include "core/tensor.hpp"
#include "recorder/recorder.hpp"
#include "shm/bind_fault.hpp"

namespace unicomm {

class FastCalls {
  public:
    FastCalls(nb::object recorder, uint16_t comm, double timeout)
        : recorder_(std::move(recorder)),
          r_(*nb::inst_ptr<Recorder>(recorder_)),
          comm_(comm),
          timeout(timeout) {
        nb::module_ torch = nb::module_::import_("torch");
        tensor_type_ = reinterpret_cast<PyTypeObject*>(torch.attr("Tensor").ptr());
        parameter_type_ = reinterpret_cast<PyTypeObject*>(torch.attr("nn").attr("Parameter").ptr());
        work_type_ = nb::module_::import_("unicomm.comms.work").attr("Work");
    }
    FastCalls(const FastCalls&) = delete;
    FastCalls& operator=(const FastCalls&) = delete;
    virtual ~FastCalls() = default;
    virtual void give_up() = 0;  // the communicator, for all ranks

    // The general path holds it blocked while it issues, while operations are pending or hooks are there,
    // and for good once the communicator is broken or finalized.
    void block() { ++blocks_; }
    void unblock() { --blocks_; }
    bool blocked() const { return blocks_.load() != 0; }
    bool plain(nb::handle async_op, nb::handle hints, nb::handle timeout_arg) const {
        return !blocked() && async_op.ptr() == Py_False && hints.is_none() && timeout_arg.is_none();
    }

    // Complex tensors may be lazy conjugates, which only the general path looks for.
    bool read(nb::handle tensor, Tensor& t) {
        // Subclasses may stand for something else than memory (FakeTensor, DTensor).
        PyTypeObject* type = Py_TYPE(tensor.ptr());
        if (type != tensor_type_ && type != parameter_type_) return false;
        if (!has_exchange_api(tensor.ptr())) return false;
        if (!read_tensor(tensor.ptr(), t)) {
            PyErr_Clear();
            return false;
        }
        if (t.device_type != 1 || !t.contiguous || (!t.data && t.numel)) return false;
        if (t.dtype == DType::kOther || t.dtype == DType::kComplex64 || t.dtype == DType::kComplex128)
            return false;
        return t.numel != 1 || t.dtype > DType::kFloat16 || !negated(tensor);
    }

    static bool overlap(const Tensor& a, const Tensor& b) {
        auto *x = static_cast<char*>(a.data), *y = static_cast<char*>(b.data);
        return x < y + b.bytes && y < x + a.bytes;
    }

    // Of an operation that starts now, by its number and that of unicomm/comms/operations/table.py.
    ring::NewRecord record_of(uint32_t op, uint64_t seq, int peer) {
        ring::NewRecord n;
        n.seq = seq;
        n.op_id = next_op_id();
        n.comm = comm_;
        n.op = static_cast<uint16_t>(op);
        n.peer = peer;
        n.timeout_ms = static_cast<uint32_t>(std::min(timeout * 1000, 4294967295.0));
        n.frame = r_.caller_frame();
        n.start_now = true;
        return n;
    }
    ring::Writer& writer() { return r_.writer; }
    // Of an operation beside the communicator's own: who was interrupted in it is lost for those, too.
    nb::object failure(const Fault& fault) {
        try {
            return fault_tuple(fault);
        } catch (nb::python_error&) {
            give_up();
            throw;
        }
    }

    // A Work that has completed is one with a name and a number; its __init__ would set just these.
    nb::object work(nb::handle name, uint64_t seq) {
        auto* type = reinterpret_cast<PyTypeObject*>(work_type_.ptr());
        nb::object made = nb::steal(type->tp_new(type, no_arguments_.ptr(), nullptr));
        nb::int_ number(seq);
        if (!made.is_valid() || PyObject_SetAttr(made.ptr(), name_.ptr(), name.ptr()) < 0 ||
            PyObject_SetAttr(made.ptr(), seq_name_.ptr(), number.ptr()) < 0) {
            throw nb::python_error();
        }
        return made;
    }

  protected:
    static nb::object no() { return nb::borrow(Py_False); }

    nb::object recorder_;  // kept alive
    Recorder& r_;
    uint16_t comm_;

  private:
    // The imaginary part of a lazy conjugate is a lazy negation: memory holds the opposite of its values. It
    // has a stride of two, so it can only be contiguous with one element.
    bool negated(nb::handle tensor) {
        PyObject* answer = PyObject_CallMethodNoArgs(tensor.ptr(), is_neg_.ptr());
        if (!answer) PyErr_Clear();
        Py_XDECREF(answer);
        return answer != Py_False;
    }

    std::atomic<int> blocks_{0};
    nb::object work_type_;
    nb::tuple no_arguments_ = nb::make_tuple();
    nb::str is_neg_{"is_neg"}, name_{"name"}, seq_name_{"seq"};
    PyTypeObject *tensor_type_, *parameter_type_;  // live as long as torch, which is never unloaded

  public:
    double timeout;
};

}  // namespace unicomm
