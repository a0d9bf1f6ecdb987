// What native fast paths share: which calls they take, how they read tensors without a check of Python types,
// and the record of an operation.
//
// A fast path takes only the common case: exact tensors on the CPU, no hints, no pending or running
// operation, no hooks. In every other case, also if an argument is wrong, it returns False before it has done
// anything, and the general path runs the operation or raises the error.
#pragma once
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "base/bind.hpp"
#include "base/bind_fault.hpp"
#include "operations/array.hpp"
#include "operations/opcode.hpp"
#include "operations/tensor.hpp"
#include "operations/work.hpp"
#include "recorder/recorder.hpp"
#include "shm/waiting/deferred.hpp"

namespace unicomm {

// Of a small operation: its record is written once the operation has been announced. The GIL is held until it
// has to wait, and released from then on until the end of its own life.
class DeferredRecord : public Deferred {
  public:
    // Made with the GIL. `record` must outlive it.
    DeferredRecord(Recorder& recorder, ring::NewRecord& record) : recorder_(recorder), record_(record) {}
    ~DeferredRecord() override {
        if (state_ != nullptr) with_end_of_python([this] { PyEval_RestoreThread(state_); });
    }
    // Returns the id of the record, which is written now if the operation ended before it was announced.
    uint64_t id() {
        on_announced();
        return id_;
    }

  protected:
    void on_announced() override {
        if (!written_) id_ = recorder_.begin(record_);
        written_ = true;
    }
    void on_wait() override {
        on_announced();  // needs the GIL
        if (state_ == nullptr) state_ = PyEval_SaveThread();
    }

  private:
    Recorder& recorder_;
    ring::NewRecord& record_;
    bool written_ = false;
    uint64_t id_ = 0;
    PyThreadState* state_ = nullptr;
};

class FastCalls {
  public:
    FastCalls(nb::object recorder, uint16_t comm, double timeout)
        : recorder_(std::move(recorder)),
          r_(*nb::inst_ptr<Recorder>(recorder_)),
          comm_(comm),
          works_(nb::module_::import_("unicomm.comms.work").attr("Work")),
          timeout(timeout) {
        nb::module_ torch = nb::module_::import_("torch");
        array_type_ = reinterpret_cast<PyTypeObject*>(nb::module_::import_("numpy").attr("ndarray").ptr());
        tensor_type_ = reinterpret_cast<PyTypeObject*>(torch.attr("Tensor").ptr());
        parameter_type_ = reinterpret_cast<PyTypeObject*>(torch.attr("nn").attr("Parameter").ptr());
    }
    FastCalls(const FastCalls&) = delete;
    FastCalls& operator=(const FastCalls&) = delete;
    virtual ~FastCalls() = default;
    virtual void give_up() = 0;  // aborts the communicator, for all ranks
    // Wakes the thread that waits in the core but ends its wait once the fast path is blocked.
    virtual void wake_waiting() {}

    // The general path blocks the fast path while it issues an operation, while operations are pending or
    // hooks are registered, and for good once the communicator is broken or finalized.
    void block() {
        ++blocks_;
        if (gives_way_) wake_waiting();
    }
    void unblock() { --blocks_; }
    bool blocked() const { return blocks_.load() != 0; }
    bool plain(nb::handle async_op, nb::handle hints, nb::handle timeout_arg) const {
        return !blocked() && async_op.ptr() == Py_False && hints.is_none() && timeout_arg.is_none();
    }

    // While it lives, its thread waits and ends the wait once the fast path is blocked.
    class GivesWay {
      public:
        explicit GivesWay(FastCalls& calls) : calls_(calls) { calls_.gives_way_ = true; }
        ~GivesWay() { calls_.gives_way_ = false; }
        GivesWay(const GivesWay&) = delete;
        GivesWay& operator=(const GivesWay&) = delete;
        bool now() const { return calls_.blocked(); }

      private:
        FastCalls& calls_;
    };

    // An operation on a fast path, while it runs: an object on the stack of its thread. Made and destroyed
    // with the GIL, which guards the list of them.
    class Running {
      public:
        Running(FastCalls& calls, uint32_t op, uint64_t seq)
            : op(op), seq(seq), thread(pthread_self()), calls_(calls), next(calls.running_) {
            calls.running_ = this;
        }
        ~Running() {
            Running** at = &calls_.running_;
            while (*at != this) at = &(*at)->next;
            *at = next;
        }
        Running(const Running&) = delete;
        Running& operator=(const Running&) = delete;

        const uint32_t op;
        const uint64_t seq;
        const pthread_t thread;

      private:
        FastCalls& calls_;

      public:
        Running* next;
    };
    // The operations that run now, as (code, number). With `here`, only those of this thread, which a signal
    // handler has interrupted.
    std::vector<std::pair<uint32_t, uint64_t>> running(bool here) const {
        std::vector<std::pair<uint32_t, uint64_t>> found;
        for (Running* r = running_; r; r = r->next) {
            if (!here || pthread_equal(r->thread, pthread_self())) found.push_back({r->op, r->seq});
        }
        return found;
    }

    // Complex tensors may be lazy conjugates, which only the general path checks.
    bool read(nb::handle tensor, Tensor& t) {
        // The memory of a subclass may not hold its values (FakeTensor, DTensor).
        PyTypeObject* type = Py_TYPE(tensor.ptr());
        if (type != tensor_type_ && type != parameter_type_) return false;
        if (!has_exchange_api(tensor.ptr())) return false;
        if (!read_tensor(tensor.ptr(), t)) {
            PyErr_Clear();
            return false;
        }
        if (t.device_type != 1 || !t.contiguous || (!t.data && t.numel)) return false;
        if (t.dtype >= DType::kOther || t.dtype == DType::kComplex64 || t.dtype == DType::kComplex128)
            return false;
        return t.numel != 1 || t.dtype > DType::kFloat16 || !negated(tensor);
    }

    // The same, also for a numpy array. `writes`: the operation writes to it.
    bool read(nb::handle value, bool writes, Tensor& t) {
        if (Py_TYPE(value.ptr()) != array_type_) return read(value, t);
        return read_array(value.ptr(), writes, t) && t.contiguous && (t.data || !t.numel);
    }

    static bool overlap(const Tensor& a, const Tensor& b) {
        auto *x = static_cast<char*>(a.data), *y = static_cast<char*>(b.data);
        return x < y + b.bytes && y < x + a.bytes;
    }

    // Returns the record of an operation that starts now, which `begin` writes; `op` is its code.
    ring::NewRecord record_of(uint32_t op, uint64_t seq, int peer) {
        ring::NewRecord n;
        n.seq = seq;
        n.op_id = next_op_id();
        n.comm = comm_;
        n.op = static_cast<uint16_t>(op);
        n.peer = peer;
        n.timeout_ms = ring::timeout_ms(timeout);
        n.start_now = true;
        n.created_ns = now_ns();
        return n;
    }
    // That of a send or receive.
    ring::NewRecord record_of_message(bool send, const Tensor& t, uint64_t seq, int peer) {
        ring::NewRecord n = record_of(uint32_t(send ? OpCode::kSend : OpCode::kRecv), seq, peer);
        n.flags = static_cast<uint16_t>(ring::kP2P | (send ? 0 : ring::kReceive));
        n.n_in = send;
        n.n_out = !send;
        if (send) {
            describe(t, true, n.in_numel, n.in_dtype, n.in_ndim, n.in_dims);
        } else {
            describe(t, true, n.out_numel, n.out_dtype, n.out_ndim, n.out_dims);
        }
        return n;
    }
    uint64_t begin(ring::NewRecord& n) { return r_.begin(n); }
    ring::Writer& writer() { return r_.writer; }
    // For an operation outside the order of the communicator: an interrupted rank is lost for the
    // communicator, too.
    nb::object failure(const Fault& fault) {
        try {
            return fault_tuple(fault);
        } catch (nb::python_error&) {
            give_up();
            throw;
        }
    }

    // Returns the Work of a completed operation.
    nb::object work(nb::handle name, uint64_t seq) { return works_.make(name, seq); }

  protected:
    static nb::object no() { return nb::borrow(Py_False); }

    nb::object recorder_;  // keeps the recorder alive
    Recorder& r_;
    uint16_t comm_;

  private:
    // The imaginary part of a lazy conjugate is a lazy negation: memory holds the negated values. Its stride
    // is two, so it is contiguous only if it has one element.
    bool negated(nb::handle tensor) {
        PyObject* answer = call_method(tensor.ptr(), is_neg_.ptr());
        if (!answer) PyErr_Clear();
        Py_XDECREF(answer);
        return answer != Py_False;
    }

    std::atomic<int> blocks_{0};
    std::atomic<bool> gives_way_{false};
    CompletedWorks works_;
    nb::str is_neg_{"is_neg"};
    // Live as long as torch and numpy, which are never unloaded.
    PyTypeObject *tensor_type_, *parameter_type_, *array_type_;

  public:
    double timeout;

  private:
    Running* running_ = nullptr;
};

}  // namespace unicomm
