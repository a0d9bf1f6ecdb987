// A transport as Python holds it: with its slots.
#pragma once
#include <memory>

#include "base/bind.hpp"
#include "base/bind_fault.hpp"
#include "transport/collectives.hpp"

namespace unicomm::transport {

struct Bound {
    explicit Bound(std::shared_ptr<Transport> made) : transport(std::move(made)), slots(transport) {}
    std::shared_ptr<Transport> transport;
    Slots slots;
};

// Raises what an operation ended with that only ends done or by force.
inline void settle(Transport& transport, Ended ended) {
    if (ended == Ended::kSignal) {
        {
            GilReleased released;
            transport.drop();  // before the exception gives the tensors back to the program
        }
        fault_tuple(Fault{.code = FaultCode::kInternal, .culprits = {}, .claims = {}, .detail = {}});
    }
    if (ended != Ended::kDone) throw Failure("the communicator has ended");
    raise_late_signals();
}

}  // namespace unicomm::transport
