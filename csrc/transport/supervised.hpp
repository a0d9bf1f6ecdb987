// Operations that Python code supervises when they take longer than a moment, and that the general path runs
// as well.
#pragma once
#include <mutex>

#include "base/bind.hpp"
#include "shm/fast_operations.hpp"
#include "shm/group.hpp"

namespace unicomm::transport {

class SupervisedOperations : public FastOperations {
  public:
    // Holds `supervisor` only weakly: Python does not see what a C++ object holds.
    explicit SupervisedOperations(nb::handle supervisor)
        : supervisor_(nb::steal(PyWeakref_NewRef(supervisor.ptr(), nullptr))) {
        if (!supervisor_.is_valid()) throw nb::python_error();
    }

    std::mutex& running() override { return running_; }
    // Nobody knows how far an interrupted operation has come.
    void interrupted() override { ask("abort"); }
    void abort() override { ask("abort"); }

    // Runs a collective of the general path, of a kind and size that the operations take. Called without the
    // GIL.
    Fault run(const shm::Op& op, const Tensor& in, const Tensor& out) {
        std::lock_guard lock(running_);
        return run_alone(op, in, out);
    }
    // Waits until no operation runs. Called without the GIL.
    void wait_idle() { std::lock_guard lock(running_); }

  protected:
    virtual Fault run_alone(const shm::Op& op, const Tensor& in, const Tensor& out) = 0;

    // Calls a method of the supervisor, which returns whether the operation must fail. It must if there is no
    // supervisor any more, or if the method raises. Called with or without the GIL.
    template <class... Arguments>
    bool ask(const char* method, Arguments... arguments) const {
        bool answer = true;
        with_end_of_python([&] {
            nb::gil_scoped_acquire gil;
            try {
                nb::object found = supervisor_();
                if (!found.is_none()) answer = nb::cast<bool>(found.attr(method)(arguments...));
            } catch (nb::python_error& error) {
                error.discard_as_unraisable(method);
            }
        });
        return answer;
    }

  private:
    nb::object supervisor_;
    std::mutex running_;
};

}  // namespace unicomm::transport
