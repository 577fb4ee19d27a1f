#include "errors.hpp"

#include <sys/time.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <unordered_map>

namespace ascend {
namespace {

thread_local Error last_error = kSuccess;
thread_local std::string next_message;
// What aclGetRecentErrMsg returned stays valid until the thread's next call of it.
thread_local std::string given_message;

// CANN's date: 2026-01-31-12:59:59.123.456
std::string now() {
  timeval time{};
  gettimeofday(&time, nullptr);
  tm parts{};
  localtime_r(&time.tv_sec, &parts);
  char day[32];
  strftime(day, sizeof day, "%Y-%m-%d-%H:%M:%S", &parts);
  char text[48];
  snprintf(text, sizeof text, "%s.%03ld.%03ld", day, static_cast<long>(time.tv_usec / 1000),
           static_cast<long>(time.tv_usec % 1000));
  return text;
}

}  // namespace

Error failed(Error code) {
  last_error = code;
  return code;
}

Error failed(Error code, const std::string& text) {
  next_message = text;
  return failed(code);
}

void set_error_message(const char* text) { next_message = text; }

std::string take_error_message() {
  std::string text = std::move(next_message);
  next_message.clear();
  return text;
}

std::string inner_error(const std::string& call, const std::string& reason) {
  return "EE9999: Inner Error!\nEE9999: [PID: " + std::to_string(getpid()) + "] " + now() + " " +
         call + " execute failed, reason=[" + reason +
         "][FUNC:FuncErrorReason][FILE:error_message_manage.cc][LINE:61]\n"
         "        TraceBack (most recent call last):\n";
}

// The runtime's own words; torch_npu looks for some of them (torch_npu/csrc/core/npu/NPUQueue.cpp).
std::string reason_of(Error code) {
  static const std::unordered_map<Error, std::string> reasons = {
      {ACL_ERROR_RT_DEVICE_TASK_ABORT, "device task abort"},
      {ACL_ERROR_RT_LOST_HEARTBEAT, "lost heartbeat"},
      {ACL_ERROR_RT_AICORE_TIMEOUT, "aicore timeout"},
      {ACL_ERROR_RT_AICORE_EXCEPTION, "aicore exception"},
      {ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "stream sync timeout"},
      {ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, "event sync timeout"},
      {ACL_ERROR_RT_DEVICE_MEM_ERROR, "device mem error"},
      {ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR, "hbm Multi-bit ECC error"},
      {ACL_ERROR_RT_SUSPECT_DEVICE_MEM_ERROR, "suspect device mem error"},
      {ACL_ERROR_RT_LINK_ERROR, "device network link error"},
      {ACL_ERROR_RT_COMM_OP_RETRY_FAIL, "hccl op retry failed"},
      {ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, "suspect remote error"},
  };
  const auto found = reasons.find(code);
  return found == reasons.end() ? "error " + std::to_string(code) : found->second;
}

}  // namespace ascend

const char* aclGetRecentErrMsg() {
  ascend::given_message = ascend::take_error_message();
  return ascend::given_message.c_str();
}

aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ascend::last_error; }

aclError aclrtGetLastError(aclrtLastErrLevel) {
  const aclError code = ascend::last_error;
  ascend::last_error = ascend::kSuccess;
  return code;
}
