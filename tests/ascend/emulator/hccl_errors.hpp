// The texts of HCCL's errors, in CANN's form, and the codes that come with them.
//
// The texts are those that logs of torch_npu users and the fault diagnosis chapters of HCCL's user
// guide (hicann/hccl, docs/zh/user_guide/fault_diagnosis) show.
#pragma once

#include <string>

#include "stream.hpp"

namespace hccl {

// What torch_npu reports with EI0002 (its docs/.../troubleshooting_cases/HCCL_timeout.md).
inline constexpr ascend::Error kNotifyTimeout = 507048;  // ACL_ERROR_RT_FFTS_PLUS_TIMEOUT
// Of work whose communicator was destroyed under it. Not documented; of the runtime's codes it is
// the one of a stream that was aborted.
inline constexpr ascend::Error kCommunicatorDestroyed = 107023;  // ACL_ERROR_RT_STREAM_ABORT

// Each sets the text that aclGetRecentErrMsg gives.
void report_environment(const std::string& variable, const std::string& value,
                        const std::string& allowed);                      // EI0001
void report_notify_timeout(const std::string& peer, const std::string& operation,
                           const std::string& abnormal);                  // EI0002
void report_parameter(const std::string& function, const std::string& parameter,
                      const std::string& value, const std::string& allowed);  // EI0003
void report_link_timeout(const std::string& local, const std::string& remote,
                         int64_t timeout_s);                              // EI0006
void report_error_cqe(const std::string& local, const std::string& remote);  // EI0013
void report_negotiation_timeout(const std::string& reason);               // EI0015
void report_inner(const std::string& what);                               // EI9999

}  // namespace hccl
