// The handle of an operation, as far as the core makes it: its name and its number. `unicomm.Work` is the
// class on top of it.
#pragma once
#include <utility>

#include "base/bind.hpp"

namespace unicomm {

// Makes handles of operations that have completed. A handle that its user has dropped is used again for the
// next operation, so that one which nobody keeps costs next to nothing.
class CompletedWorks {
  public:
    // `type`: unicomm.Work, a subclass of the type here that adds no memory to its objects.
    explicit CompletedWorks(nb::object type);
    nb::object make(nb::handle name, uint64_t seq);

  private:
    nb::object type_;
    nb::object last_;
};

}  // namespace unicomm
