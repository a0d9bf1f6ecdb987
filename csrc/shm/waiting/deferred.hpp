// What a thread puts off when it begins a small operation.
//
// It keeps Python's lock until it has to wait for longer: most waits are over at once, and to release the
// lock and take it again costs as much as such a wait. And it writes the record of the operation after it has
// told the other ranks, who hear of the operation while the record is written.
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
