// What a thread puts off when it begins a small operation.
//
// Its wait is often over at once. To give Python's lock back and take it again would cost as much as such a
// wait. And what a rank does after it has announced the operation to the others takes no time of its own, as
// the announcement is on its way meanwhile.
#pragma once

namespace unicomm {

class Deferred {
  public:
    Deferred() : outer_(current_) { current_ = this; }
    virtual ~Deferred() { current_ = outer_; }
    Deferred(const Deferred&) = delete;
    Deferred& operator=(const Deferred&) = delete;

    // Called by an operation once the other ranks can see it. Does nothing if this thread has put nothing
    // off; so does `waits`.
    static void announced() {
        if (current_ != nullptr) current_->on_announced();
    }
    // Called by what is about to wait for longer.
    static void waits() {
        if (current_ != nullptr) current_->on_wait();
    }

  protected:
    // Both may be called more than once, and in any order.
    virtual void on_announced() = 0;
    virtual void on_wait() = 0;

  private:
    Deferred* const outer_;
    inline static thread_local Deferred* current_ = nullptr;
};

}  // namespace unicomm
