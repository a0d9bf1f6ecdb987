// Compiled against UCX's own headers: what csrc/ucx/abi.hpp says of it must be so.
#include <ucp/api/ucp.h>
#include <ucs/config/global_opts.h>
#include <ucs/debug/log_def.h>

#include <cstddef>
#include <type_traits>

#include "ucx/abi.hpp"

namespace ours = unicomm::ucx;

#define SAME(type, theirs) static_assert(sizeof(ours::type) == sizeof(theirs))
#define SAME_PLACE(type, mine, theirs, field)                                   \
    static_assert(offsetof(ours::type, mine) == offsetof(theirs, field));       \
    static_assert(sizeof(ours::type{}.mine) == sizeof(theirs{}.field))

static_assert(sizeof(ours::Status) == sizeof(ucs_status_t) && std::is_signed_v<std::underlying_type_t<ours::Status>>);
static_assert(int(ours::kOk) == int(UCS_OK) && int(ours::kInProgress) == int(UCS_INPROGRESS));
static_assert(int(ours::kTruncated) == int(UCS_ERR_MESSAGE_TRUNCATED) && int(ours::kBusy) == int(UCS_ERR_BUSY));
static_assert(int(ours::kCanceled) == int(UCS_ERR_CANCELED) && int(ours::kLastError) == int(UCS_ERR_LAST));
static_assert(std::is_same_v<ours::Tag, ucp_tag_t>);

SAME(Params, ucp_params_t);
SAME_PLACE(Params, field_mask, ucp_params_t, field_mask);
SAME_PLACE(Params, features, ucp_params_t, features);
SAME_PLACE(Params, mt_workers_shared, ucp_params_t, mt_workers_shared);
SAME_PLACE(Params, estimated_num_eps, ucp_params_t, estimated_num_eps);
static_assert(ours::kFieldFeatures == UCP_PARAM_FIELD_FEATURES);
static_assert(ours::kFieldMtWorkersShared == UCP_PARAM_FIELD_MT_WORKERS_SHARED);
static_assert(ours::kFieldEstimatedEps == UCP_PARAM_FIELD_ESTIMATED_NUM_EPS);
static_assert(ours::kFeatureTag == UCP_FEATURE_TAG && ours::kFeatureWakeup == UCP_FEATURE_WAKEUP);

SAME(WorkerParams, ucp_worker_params_t);
SAME_PLACE(WorkerParams, thread_mode, ucp_worker_params_t, thread_mode);
SAME_PLACE(WorkerParams, flags, ucp_worker_params_t, flags);
static_assert(ours::kWorkerThreadMode == UCP_WORKER_PARAM_FIELD_THREAD_MODE);
static_assert(ours::kWorkerFlags == UCP_WORKER_PARAM_FIELD_FLAGS);
static_assert(ours::kSerialized == UCS_THREAD_MODE_SERIALIZED);
static_assert(ours::kIgnoreRequestLeak == UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK);

SAME(EndpointParams, ucp_ep_params_t);
SAME_PLACE(EndpointParams, address, ucp_ep_params_t, address);
SAME_PLACE(EndpointParams, error_mode, ucp_ep_params_t, err_mode);
SAME_PLACE(EndpointParams, error_handler, ucp_ep_params_t, err_handler);
static_assert(offsetof(ucp_err_handler_t, cb) == 0 && offsetof(ucp_err_handler_t, arg) == sizeof(void*));
static_assert(ours::kEpRemoteAddress == UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
static_assert(ours::kEpErrorMode == UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
static_assert(ours::kEpErrorHandler == UCP_EP_PARAM_FIELD_ERR_HANDLER);
static_assert(ours::kErrorModePeer == UCP_ERR_HANDLING_MODE_PEER);

SAME(EndpointAttributes, ucp_ep_attr_t);
SAME_PLACE(EndpointAttributes, transports, ucp_ep_attr_t, transports);
static_assert(offsetof(ucp_transports_t, num_entries) == sizeof(void*));
static_assert(offsetof(ucp_transports_t, entry_size) == 2 * sizeof(void*));
SAME(TransportEntry, ucp_transport_entry_t);
SAME_PLACE(TransportEntry, device_name, ucp_transport_entry_t, device_name);
static_assert(ours::kEpTransports == UCP_EP_ATTR_FIELD_TRANSPORTS);

SAME(ReceiveInfo, ucp_tag_recv_info_t);
SAME_PLACE(ReceiveInfo, sender_tag, ucp_tag_recv_info_t, sender_tag);
SAME_PLACE(ReceiveInfo, length, ucp_tag_recv_info_t, length);

SAME(RequestParams, ucp_request_param_t);
SAME_PLACE(RequestParams, mask, ucp_request_param_t, op_attr_mask);
SAME_PLACE(RequestParams, flags, ucp_request_param_t, flags);
SAME_PLACE(RequestParams, callback, ucp_request_param_t, cb);
SAME_PLACE(RequestParams, user_data, ucp_request_param_t, user_data);
SAME_PLACE(RequestParams, memory_type, ucp_request_param_t, memory_type);
SAME_PLACE(RequestParams, receive_info, ucp_request_param_t, recv_info);
static_assert(ours::kOpCallback == UCP_OP_ATTR_FIELD_CALLBACK && ours::kOpUserData == UCP_OP_ATTR_FIELD_USER_DATA);
static_assert(ours::kOpFlags == UCP_OP_ATTR_FIELD_FLAGS && ours::kOpMemoryType == UCP_OP_ATTR_FIELD_MEMORY_TYPE);
static_assert(ours::kOpReceiveInfo == UCP_OP_ATTR_FIELD_RECV_INFO && ours::kCloseForce == UCP_EP_CLOSE_FLAG_FORCE);
static_assert(ours::kHostMemory == UCS_MEMORY_TYPE_HOST);

// A type as the processor passes it: enums as their integers, pointers as pointers.
template <class T>
struct Passed {
    using type = T;
};
template <class T>
    requires std::is_enum_v<T>
struct Passed<T> {
    using type = std::underlying_type_t<T>;
};
template <class T>
struct Passed<T*> {
    using type = void*;
};
template <class A, class B>
constexpr bool alike = sizeof(typename Passed<A>::type) == sizeof(typename Passed<B>::type) &&
                       std::is_pointer_v<typename Passed<A>::type> == std::is_pointer_v<typename Passed<B>::type>;
template <>
inline constexpr bool alike<void, void> = true;

template <class Ours, class Theirs>
struct SameCall : std::false_type {};
template <class A, class B, class... As, class... Bs>
    requires(sizeof...(As) == sizeof...(Bs))
struct SameCall<A(As...), B(Bs...)> : std::bool_constant<alike<A, B> && (alike<As, Bs> && ...)> {};

#define CHECK_FUNCTION(name, since, ...) static_assert(SameCall<__VA_ARGS__, decltype(::name)>::value, #name);
namespace unicomm::ucx {
UNICOMM_UCP_FUNCTIONS(CHECK_FUNCTION)
UNICOMM_UCS_FUNCTIONS(CHECK_FUNCTION)
}  // namespace unicomm::ucx
static_assert(SameCall<ours::SendCallback, std::remove_pointer_t<ucp_send_nbx_callback_t>>::value);
static_assert(SameCall<ours::ReceiveCallback, std::remove_pointer_t<ucp_tag_recv_nbx_callback_t>>::value);
static_assert(SameCall<ours::LogHandler, std::remove_pointer_t<ucs_log_func_t>>::value);
static_assert(ours::kWarning == UCS_LOG_LEVEL_WARN && UCS_LOG_FUNC_RC_STOP == 0 && UCS_LOG_FUNC_RC_CONTINUE == 1);
