// Memory that will be read next, fetched by threads that would otherwise wait.
#pragma once

#include <cstdint>

namespace kunlun {

// Names what the threads read next: thread t of T begins at row rows * t / T. Nothing is fetched yet.
void announce(const void* data, int64_t rows, int64_t row_bytes);

// Brings up to `lines` more cache lines of the calling thread's part close; false when enough is there.
bool fetch_ahead(int lines);

}  // namespace kunlun
