// The mixture-of-experts kernels' own source, compiled for a CPU.
#include <cuda_runtime.h>

#include "moe.cu"

// For tests of single index maps.
extern "C" int row_of_value(int octet, int value) { return value_row(octet, value); }
extern "C" int octets_of_gate(int intermediate) { return gate_octets(intermediate); }
extern "C" int octet_of_up(int octet, int intermediate) { return up_octet(octet, intermediate); }
extern "C" int quarters_to_up(int intermediate) { return up_quarters(intermediate); }
