// Versions and settings of the process as a whole.
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "machine.hpp"

using namespace ascend;

namespace {

// What is emulated: CANN 8.5.0 with the driver of its release.
constexpr const char* kCannVersion = "8.5.0";
constexpr const char* kDriverVersion = "25.5.0";

std::atomic<uint64_t> op_timeout_us = 547'000'000;

}  // namespace

aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion* version) {
  *version = {};
  strcpy(version->version, name == ACL_PKG_NAME_DRIVER ? kDriverVersion : kCannVersion);
  return kSuccess;
}

aclError aclsysGetVersionStr(char* package, char* version) {
  strcpy(version, strcmp(package, "driver") == 0 ? kDriverVersion : kCannVersion);
  return kSuccess;
}

aclError aclGetCannAttributeList(const aclCannAttr** attributes, size_t* count) {
  static const aclCannAttr has[] = {ACL_CANN_ATTR_INF_NAN};
  *attributes = has;
  *count = 1;
  return kSuccess;
}

aclError aclGetCannAttribute(aclCannAttr attribute, int32_t* value) {
  *value = attribute == ACL_CANN_ATTR_INF_NAN ? 1 : 0;
  return kSuccess;
}

// The host's arithmetic knows infinity and NaN, and no other way.
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
  return mode == ACL_RT_OVERFLOW_MODE_INFNAN ? kSuccess : failed(ACL_ERROR_INVALID_PARAM);
}

aclError aclrtSetOpExecuteTimeOut(uint32_t timeout_s) {
  op_timeout_us = uint64_t{timeout_s} * 1'000'000;
  return kSuccess;
}

aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout_us, uint64_t* actual_us) {
  op_timeout_us = timeout_us;
  *actual_us = timeout_us;
  return kSuccess;
}

// Choices among kernels of the device; the host's are always the same, and deterministic.
aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) { return kSuccess; }
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return kSuccess; }

aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) {
  *value = 0;
  return kSuccess;
}

// Goes to CANN's own log, for which warnings and worse are printed if the variable asks for it.
void aclAppLog(aclLogLevel level, const char* function, const char*, uint32_t, const char* format,
               ...) {
  static const bool is_wanted = getenv("ASCEND_SLOG_PRINT_TO_STDOUT") != nullptr &&
                                strcmp(getenv("ASCEND_SLOG_PRINT_TO_STDOUT"), "1") == 0;
  if (!is_wanted || level < ACL_WARNING) return;
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "[%s] PTA(%s): ", level == ACL_ERROR ? "ERROR" : "WARNING", function);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}
