// Who does what in the mixture-of-experts kernels. Host and device: a CPU test runs these same functions.
//
// A warp step is an octet of rows by 512 columns in four parts, as layout.cuh defines it for P = 4: two neighbouring rows
// in each quarter of a 128-row scale tile, and a tile of 8 / 4 = 2 tokens on the other side of the MMA. So few tokens in
// a tile suit experts, most of which are elected by one or two tokens; few rows make enough work for every
// multiprocessor, and all of K in one CTA, so that no sum is split over CTAs.
#pragma once
#include <cmath>

#include "layout.cuh"

namespace nvfp4 {

constexpr int kParts = 4;
constexpr int kOctetRows = 8;
constexpr int kTileOctets = kTileRows / kOctetRows;
constexpr int kStepColumns = kParts * kPartColumns;
constexpr int kTileTokens = 8 / kParts;
constexpr int kMaxTokens = 32;
constexpr int kMaxTopK = 16;
constexpr int kMaxExperts = 512;
constexpr int kMaxPairs = kMaxTokens * kMaxTopK;
constexpr int kTileValues = kTileTokens * kOctetRows;  // sums of one tile and octet

NVFP4_HD int steps_of(int k) { return (k + kStepColumns - 1) / kStepColumns; }

// First of a lane's 32 columns in a step; past k there is nothing to load.
NVFP4_HD int lane_column(int step, int g, int t) { return step * kStepColumns + column_of<kParts>(g, t); }

// Octets that hold the gate rows of an expert with this intermediate size: a multiple of 128, or 64, which shares its only
// scale tile with the up rows.
NVFP4_HD int gate_octets(int intermediate) { return (intermediate + kTileRows - 1) / kTileRows * kTileOctets; }

// The up row of a gate row lies `intermediate` further: in this octet, and this many quarters on.
NVFP4_HD int up_octet(int octet, int intermediate) { return octet + intermediate / kTileRows * kTileOctets; }
NVFP4_HD int up_quarters(int intermediate) { return intermediate % kTileRows / 32; }

// Sums of a tile and octet: value index token * 8 + quarter * 2 + (row in the quarter).
NVFP4_HD int value_index(int token, int quarter, int row) { return token * kOctetRows + quarter * 2 + row; }
NVFP4_HD int value_row(int octet, int value) { return row_of<kParts>(octet, value % 2 * kParts, value % kOctetRows / 2); }

// An MMA leaves in lane (g, t) the rows g / 4 of every quarter with part g % 4, times columns 2t and 2t + 1, which are
// token t / 2 with parts 2 (t % 2) and the next. Equal parts meet where t % 2 = g / 2 % 2, in column 2t + g % 2.
NVFP4_HD bool parts_meet(int g, int t) { return t % 2 == g / 2 % 2; }
NVFP4_HD float met_value(const float (&acc)[2][4], int g, int quarter) {
    return g % 2 ? acc[quarter / 2][quarter % 2 * 2 + 1] : acc[quarter / 2][quarter % 2 * 2];
}

// Adding the four parts up: in two exchanges each lane keeps half of the quarters it has and sends the others, first to
// the lane with the other g % 2, then to the one with the other g / 2 % 2 where parts meet. It ends with quarter g % 4.
constexpr int kFirstExchange = 4, kSecondExchange = 9;
struct Halves {
    float keep, send;
};
NVFP4_HD Halves halves(bool upper, float low, float high) { return upper ? Halves{high, low} : Halves{low, high}; }
NVFP4_HD int lane_value(int g, int t) { return value_index(t / 2, g % 4, g / 4); }

NVFP4_HD float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

// The pairs (token, rank) that elected an expert of a call: routed experts own pairs 0 .. m k - 1, row token * k + rank of
// the intermediate buffer; the shared expert owns m rows after those.
NVFP4_HD int64_t intermediate_offset(bool shared, int row, int pairs, int routed_size, int shared_size) {
    return shared ? int64_t(pairs) * routed_size + int64_t(row) * shared_size : int64_t(row) * routed_size;
}

}  // namespace nvfp4
