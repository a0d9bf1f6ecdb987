// A lock that a thread holds when it begins an operation, and gives back only if the operation has to wait.
//
// Most waits of small operations are over at once, and to give Python's lock back and take it again costs as
// much as such a wait.
#pragma once

namespace unicomm {

class HeldLock {
  public:
    HeldLock() : outer_(current_) { current_ = this; }
    virtual ~HeldLock() { current_ = outer_; }
    HeldLock(const HeldLock&) = delete;
    HeldLock& operator=(const HeldLock&) = delete;

    // Called by what is about to wait for longer. Does nothing if this thread holds no such lock.
    static void give_back() {
        if (current_ != nullptr) current_->release();
    }

  protected:
    virtual void release() = 0;  // may be called again

  private:
    HeldLock* const outer_;
    inline static thread_local HeldLock* current_ = nullptr;
};

}  // namespace unicomm
