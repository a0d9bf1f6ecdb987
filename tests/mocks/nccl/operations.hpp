// Collectives and point-to-point operations: checked, and put into their streams.
#pragma once
#include "comm.hpp"

namespace mock_nccl {

// The call with what all operations have.
Call begin(const char* name, const void* send, void* recv, size_t count, int dtype, StreamHandle stream);

Result point_to_point(Call call, bool sending, void* data, int peer, CommHandle comm);
Result broadcast(Call call, const void* send, void* recv, int root, CommHandle comm);
Result all_to_all(Call call, const void* send, void* recv, CommHandle comm);
Result gather(Call call, const void* send, void* recv, int root, CommHandle comm);
Result scatter(Call call, const void* send, void* recv, int root, CommHandle comm);
Result all_gather(Call call, const void* send, void* recv, CommHandle comm);
Result all_reduce(Call call, int op, CommHandle comm);
Result reduce_to(Call call, int op, int root, CommHandle comm);
Result reduce_scatter(Call call, int op, CommHandle comm);
Result all_to_all_v(Call call, const void* send, const size_t* counts, const size_t* from, void* recv,
                    const size_t* recv_counts, const size_t* to, CommHandle comm);

// The checks that all operations of a communicator share; false with call.error set.
bool usable(Call& call, CommHandle comm);
bool known_type(Call& call, int dtype);
bool known_rank(Call& call, int rank, const char* what);

}  // namespace mock_nccl
