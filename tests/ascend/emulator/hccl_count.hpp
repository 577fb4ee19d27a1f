// How often this process called each function of HCCL.
//
// Where ASCEND_EMULATOR_COUNTS names a folder, the counts are in its file hccl-<pid>.counts while
// the process runs and after it has ended, however that was: records of 64 bytes, each a name
// padded with zeros to 56 bytes and a little-endian uint64. An unused record begins with zero.
#pragma once

namespace hccl {

// `name` has to outlive the process's calls.
void count(const char* name);

}  // namespace hccl
