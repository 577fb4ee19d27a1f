// What torch_npu is linked with and the emulator does not have: a call of one fails by its name.
// acl_rt.h is not included: the signatures do not matter.
#include <cstdio>
#include <string>

namespace ascend {
void set_error_message(const char* text);
}

namespace {

constexpr long kNotSupported = 200001;  // ACL_ERROR_API_NOT_SUPPORT

long refuse(const char* name, long result) {
  const std::string text = std::string("EE9999: ") + name + " is not emulated\n";
  fputs(("Ascend emulator: " + text).c_str(), stderr);
  ascend::set_error_message(text.c_str());
  return result;
}

}  // namespace

#define ABSENT(name)                                                         \
  extern "C" __attribute__((visibility("default"))) long name() {            \
    return refuse(#name, kNotSupported);                                     \
  }
// Those return a pointer.
#define ABSENT_MAKER(name)                                                   \
  extern "C" __attribute__((visibility("default"))) long name() {            \
    return refuse(#name, 0);                                                 \
  }

// Operators compiled by the graph engine; torch_npu runs those of aclnn in their place.
ABSENT_MAKER(aclCreateDataBuffer)
ABSENT_MAKER(aclCreateTensorDesc)
ABSENT_MAKER(aclopCreateAttr)
ABSENT(aclDestroyDataBuffer)
ABSENT(aclDestroyTensorDesc)
ABSENT(aclGetTensorDescDimV2)
ABSENT(aclGetTensorDescFormat)
ABSENT(aclGetTensorDescNumDims)
ABSENT(aclGetTensorDescType)
ABSENT(aclSetTensorDescName)
ABSENT(aclSetTensorFormat)
ABSENT(aclSetTensorPlaceMent)
ABSENT(aclSetTensorShape)
ABSENT(aclopCompileAndExecute)
ABSENT(aclopDestroyAttr)
ABSENT(aclopSetAttrBool)
ABSENT(aclopSetAttrDataType)
ABSENT(aclopSetAttrFloat)
ABSENT(aclopSetAttrInt)
ABSENT(aclopSetAttrListBool)
ABSENT(aclopSetAttrListFloat)
ABSENT(aclopSetAttrListInt)
ABSENT(aclopSetAttrListListInt)
ABSENT(aclopSetAttrString)

// Kernels for the silicon.
ABSENT(aclrtBinaryGetFunction)
ABSENT(aclrtBinaryLoadFromData)
ABSENT(aclrtGetFunctionAddr)
ABSENT(rtDevBinaryRegister)
ABSENT(rtFunctionRegister)
ABSENT(rtGetC2cCtrlAddr)
ABSENT(rtKernelLaunch)

// Virtual memory: expandable segments, and memory shared between processes.
ABSENT(aclrtFreePhysical)
ABSENT(aclrtMallocPhysical)
ABSENT(aclrtMapMem)
ABSENT(aclrtMemExportToShareableHandle)
ABSENT(aclrtMemImportFromShareableHandle)
ABSENT(aclrtMemSetPidToShareableHandle)
ABSENT(aclrtReleaseMemAddress)
ABSENT(aclrtReserveMemAddress)
ABSENT(aclrtUnmapMem)

// Callbacks run on threads of streams, so no thread of the host has to process reports.
ABSENT(aclrtProcessReport)

// Dumps and profiles.
ABSENT(aclmdlFinalizeDump)
ABSENT(aclmdlInitDump)
ABSENT(aclmdlSetDump)
ABSENT(MsprofGetHashId)
ABSENT(MsprofRegisterCallback)
ABSENT(MsprofReportAdditionalInfo)
ABSENT(MsprofReportApi)
ABSENT(MsprofReportCompactInfo)
ABSENT(MsprofSysCycleTime)
