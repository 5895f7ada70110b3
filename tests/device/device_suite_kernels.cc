// The suite's tests of the kernels, against the same over flat arrays.
#include <gmock/gmock.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/convert_scaled.h"
#include "kernels/encode.h"
#include "tests/device/device_suite.h"

namespace phub {
namespace {

using kernels::DType;
using ::testing::HasSubstr;

constexpr std::array<size_t, 9> kRowFloats = {1, 3, 4, 7, 16, 127, 128, 129, 1000};

TEST_P(DeviceSuite, GatherTakesTheRowsOfItsIndex) {
  for (const size_t row_floats : kRowFloats) {
    const size_t table_rows = random(1, 300);
    const size_t rows = random(1, 300);
    const auto table = random_floats(table_rows * row_floats);
    const auto index = random_rows(rows, table_rows, false);
    const DeviceMemory from = memory(table);
    const DeviceMemory to = memory(rows * row_floats * sizeof(float));
    auto added = random_floats(rows * row_floats);
    const DeviceMemory sums = memory(added);
    const RowIndex rows_of(*device_, index);
    stream_->gather({from.floats(), table_rows, row_floats}, rows_of, to.floats());
    stream_->gather_add({from.floats(), table_rows, row_floats}, rows_of, sums.floats());
    stream_->synchronize();
    std::vector<float> expected;
    for (const uint32_t row : index) {
      expected.insert(expected.end(), table.begin() + row * row_floats,
                      table.begin() + (row + 1) * row_floats);
    }
    for (size_t i = 0; i < added.size(); ++i) added[i] += expected[i];
    ASSERT_EQ(floats(to.data(), expected.size()), expected) << row_floats;
    ASSERT_EQ(floats(sums.data(), added.size()), added) << row_floats;
  }
}

TEST_P(DeviceSuite, ScatterPutsRowsAndLeavesTheOthers) {
  for (const size_t row_floats : kRowFloats) {
    const size_t table_rows = random(1, 300);
    const size_t rows = random(1, table_rows);
    const auto index = random_rows(rows, table_rows, true);
    const auto values = random_floats(rows * row_floats);
    auto put = random_floats(table_rows * row_floats);
    auto added = put;
    const DeviceMemory from = memory(values);
    const DeviceMemory put_table = memory(put);
    const DeviceMemory add_table = memory(added);
    const RowIndex rows_of(*device_, index);
    stream_->scatter(from.floats(), rows_of, {put_table.floats(), table_rows, row_floats});
    stream_->scatter_add(from.floats(), rows_of, {add_table.floats(), table_rows, row_floats});
    stream_->synchronize();
    for (size_t i = 0; i < values.size(); ++i) {
      const size_t at = index[i / row_floats] * row_floats + i % row_floats;
      put[at] = values[i];
      added[at] += values[i];
    }
    ASSERT_EQ(floats(put_table.data(), put.size()), put) << row_floats;
    ASSERT_EQ(floats(add_table.data(), added.size()), added) << row_floats;
  }
}

// A buffer may begin anywhere: the vectors of a kernel must not assume more than a float.
TEST_P(DeviceSuite, RowsNeedNoAlignment) {
  for (const size_t row_floats : {4, 8, 128}) {
    const auto table = random_floats(64 * row_floats + 3);
    const DeviceMemory from = memory(table);
    const DeviceMemory to = memory((64 * row_floats + 1) * sizeof(float));
    const auto index = random_rows(64, 64, true);
    const RowIndex rows_of(*device_, index);
    stream_->gather({from.floats() + 3, 64, static_cast<size_t>(row_floats)}, rows_of,
                    to.floats() + 1);
    stream_->synchronize();
    const auto got = floats(to.floats() + 1, 64 * row_floats);
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i], table[3 + index[i / row_floats] * row_floats + i % row_floats]);
    }
  }
}

TEST_P(DeviceSuite, AnIndexMustFitItsTable) {
  const DeviceMemory table = memory(8 * 4 * sizeof(float));
  const DeviceMemory batch = memory(8 * 4 * sizeof(float));
  const std::vector<uint32_t> twice = {1, 2, 1};
  const std::vector<uint32_t> outside = {1, 8};
  const RowIndex twice_index(*device_, twice);
  const RowIndex outside_index(*device_, outside);
  const Rows rows{table.floats(), 8, 4};
  std::string what;
  EXPECT_EQ(code_of([&] { stream_->gather(rows, outside_index, batch.floats()); }, &what),
            ErrorCode::kInvalid);
  EXPECT_THAT(what, HasSubstr("row 8 of a table of 8 rows"));
  EXPECT_EQ(code_of([&] { stream_->scatter(batch.floats(), twice_index, rows); }, &what),
            ErrorCode::kInvalid);
  EXPECT_THAT(what, HasSubstr("twice"));
  EXPECT_EQ(code_of([&] { stream_->scatter_add(batch.floats(), twice_index, rows); }),
            ErrorCode::kInvalid);
  EXPECT_EQ(code_of([&] {
              stream_->gather({table.floats(), 9, 4}, twice_index, batch.floats());
            }),
            ErrorCode::kInvalid);
  EXPECT_EQ(code_of([&] { stream_->gather(rows, twice_index, table.floats()); }, &what),
            ErrorCode::kInvalid);
  EXPECT_THAT(what, HasSubstr("overlap"));
  stream_->gather(rows, twice_index, batch.floats());
  stream_->synchronize();
}

TEST_P(DeviceSuite, AnIndexLivesWhereItIsTold) {
  const std::vector<uint32_t> rows = {2, 0, 1};
  const auto table = random_floats(3);
  const DeviceMemory from = memory(table);
  const DeviceMemory place = memory(rows.size() * sizeof(uint32_t));
  const DeviceMemory to = memory(3 * sizeof(float));
  const size_t used = device_->stats().used_bytes;
  const RowIndex index(*device_, place.data(), rows);
  EXPECT_EQ(device_->stats().used_bytes, used);
  stream_->gather({from.floats(), 3, 1}, index, to.floats());
  stream_->synchronize();
  EXPECT_EQ(floats(to.data(), 3), (std::vector<float>{table[2], table[0], table[1]}));
}

TEST_P(DeviceSuite, AddScaledRoundsTwice) {
  for (const size_t elements : {1, 5, 1000, 100003}) {
    const auto from = random_floats(elements);
    auto to = random_floats(elements);
    const DeviceMemory device_from = memory(from);
    const DeviceMemory device_to = memory(to);
    stream_->add_scaled(-0.37f, device_from.floats(), device_to.floats(), elements);
    stream_->synchronize();
    for (size_t i = 0; i < elements; ++i) {
      const float product = -0.37f * from[i];
      to[i] = to[i] + product;
    }
    ASSERT_EQ(floats(device_to.data(), elements), to);
  }
}

TEST_P(DeviceSuite, FillStopsAtItsEnd) {
  const DeviceMemory memory_ = memory(4001);
  stream_->fill(memory_.floats(), -2.5f, 999);
  stream_->synchronize();
  EXPECT_EQ(floats(memory_.data(), 999), std::vector<float>(999, -2.5f));
  EXPECT_TRUE(is_poisoned(bytes(memory_.floats() + 999, 4)));
}

TEST_P(DeviceSuite, ConvertGivesTheBitsOfTheKernels) {
  constexpr std::array<DType, 3> kTypes = {DType::kF32, DType::kBF16, DType::kF16};
  const size_t elements = 70001;
  for (const DType from_dtype : kTypes) {
    // Any bits: numbers of every size, infinities, many kinds of NaN. All that there are of 16.
    std::vector<uint32_t> bits(elements);
    for (size_t i = 0; i < elements; ++i) {
      bits[i] = from_dtype == DType::kF32 ? static_cast<uint32_t>(engine_())
                                          : static_cast<uint32_t>(2 * i | (2 * i + 1) << 16);
    }
    const size_t from_bytes = elements * kernels::bytes_of(from_dtype);
    const DeviceMemory from = memory(from_bytes);
    device_->write(from.data(), bits.data(), from_bytes);
    for (const DType to_dtype : kTypes) {
      const size_t to_bytes = elements * kernels::bytes_of(to_dtype);
      std::vector<uint8_t> expected(to_bytes);
      kernels::convert(bits.data(), from_dtype, expected.data(), to_dtype, elements);
      const DeviceMemory to = memory(to_bytes);
      stream_->convert(from.data(), from_dtype, to.data(), to_dtype, elements);
      stream_->synchronize();
      ASSERT_EQ(bytes(to.data(), to_bytes), expected)
          << kernels::name_of(from_dtype) << " to " << kernels::name_of(to_dtype);
    }
  }
}

TEST_P(DeviceSuite, ConvertMultipliesBeforeItRounds) {
  constexpr std::array<DType, 3> kTypes = {DType::kF32, DType::kBF16, DType::kF16};
  const size_t elements = 10'001;
  const std::vector<float> values = random_floats(elements);
  const float factor = random_floats(1)[0];
  for (const DType from_dtype : kTypes) {
    std::vector<uint8_t> given(elements * kernels::bytes_of(from_dtype));
    kernels::convert(values.data(), DType::kF32, given.data(), from_dtype, elements);
    const DeviceMemory from = memory(given.size());
    device_->write(from.data(), given.data(), given.size());
    for (const DType to_dtype : kTypes) {
      std::vector<uint8_t> expected(elements * kernels::bytes_of(to_dtype));
      std::vector<float> scaled(elements);
      kernels::convert(given.data(), from_dtype, scaled.data(), DType::kF32, elements);
      for (float& value : scaled) value *= factor;
      kernels::convert(scaled.data(), DType::kF32, expected.data(), to_dtype, elements);
      const DeviceMemory to = memory(expected.size());
      stream_->convert(from.data(), from_dtype, to.data(), to_dtype, elements, factor);
      stream_->synchronize();
      ASSERT_EQ(bytes(to.data(), expected.size()), expected)
          << kernels::name_of(from_dtype) << " to " << kernels::name_of(to_dtype);
    }
  }
}

constexpr std::array<DType, 5> kCoded = {DType::kFp8E4M3, DType::kFp8E5M2, DType::kInt32,
                                         DType::kInt8, DType::kInt4};

// What one chunk after another becomes: slots, and behind them the residual.
std::vector<uint8_t> encoded(const std::vector<uint8_t>& from, DType from_dtype, float factor,
                             std::vector<float> residual, const ChunkedSlots& of, size_t bytes,
                             size_t elements) {
  std::vector<uint8_t> slots(bytes, 0xFF);
  std::vector<float> x(elements);
  kernels::convert_scaled(from.data(), from_dtype, factor, x.data(), DType::kF32, elements);
  kernels::Rounding rounding = of.rounding;
  for (size_t at = 0, slot = 0; at < elements; at += of.chunk_elements, slot += of.chunk_bytes) {
    const size_t count = std::min(of.chunk_elements, elements - at);
    kernels::encode(x.data() + at, residual.empty() ? nullptr : residual.data() + at, of.format,
                    rounding, slots.data() + slot, count);
    rounding.element += count;
  }
  const auto* const rest = reinterpret_cast<const uint8_t*>(residual.data());
  slots.insert(slots.end(), rest, rest + residual.size() * sizeof(float));
  return slots;
}

TEST_P(DeviceSuite, EncodeGivesTheBitsOfTheKernels) {
  for (const DType format : kCoded) {
    for (const DType from_dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      const size_t elements = random(1, 5000);
      const bool has_residual = random(0, 3) > 0;
      ChunkedSlots of{.format = format, .chunk_elements = random(1, 700)};
      of.chunk_bytes = (kernels::slot_bytes(format, of.chunk_elements) + 63) / 64 * 64;
      of.rounding = {random(0, 1) == 1, engine_(), random(0, 9), random(1, 99), random(0, 999)};
      const float factor = random(0, 1) == 0 ? 1 : random_floats(1)[0];
      std::vector<float> values = random_floats(elements);
      for (size_t c = 0; c * of.chunk_elements < elements; ++c) {  // of every size
        const float unit = std::bit_cast<float>(static_cast<uint32_t>(random(1, 254)) << 23);
        for (size_t i = c * of.chunk_elements; i < std::min(elements, (c + 1) * of.chunk_elements);
             ++i) {
          if (from_dtype == DType::kF32) values[i] *= unit;
          if (c % 7 == 3) values[i] = 0;
        }
      }
      values[random(0, elements - 1)] =
          std::bit_cast<float>(0x7F800000u + static_cast<uint32_t>(random(0, 1)));
      std::vector<uint8_t> given(elements * kernels::bytes_of(from_dtype));
      kernels::convert(values.data(), DType::kF32, given.data(), from_dtype, elements);
      const std::vector<float> residual = random_floats(has_residual ? elements : 0);
      const size_t chunks = (elements - 1) / of.chunk_elements;
      const size_t bytes_of_slots =
          chunks * of.chunk_bytes +
          kernels::slot_bytes(format, elements - chunks * of.chunk_elements);
      const DeviceMemory from = memory(given.size());
      device_->write(from.data(), given.data(), given.size());
      const DeviceMemory to = memory(bytes_of_slots);
      const DeviceMemory rest = memory(residual);
      stream_->encode(from.data(), from_dtype, factor, has_residual ? rest.floats() : nullptr, of,
                      to.data(), elements);
      stream_->synchronize();
      std::vector<uint8_t> got = bytes(to.data(), bytes_of_slots);
      if (has_residual) {
        const auto left = bytes(rest.data(), rest.bytes());
        got.insert(got.end(), left.begin(), left.end());
      }
      ASSERT_EQ(got, encoded(given, from_dtype, factor, residual, of, bytes_of_slots, elements))
          << kernels::name_of(from_dtype) << " to " << kernels::name_of(format) << ", " << elements
          << " in chunks of " << of.chunk_elements << (of.rounding.stochastic ? ", random" : "");
    }
  }
}

TEST_P(DeviceSuite, SlotsThatDoNotFitAreRefused) {
  const DeviceMemory from = memory(1000 * sizeof(float));
  const DeviceMemory to = memory(1008);
  const auto refused = [&](const ChunkedSlots& of, const void* slots, float* residual = nullptr,
                           size_t elements = 1000) {
    std::string what;
    EXPECT_EQ(code_of(
                  [&] {
                    stream_->encode(from.data(), DType::kF32, 1, residual, of,
                                    const_cast<void*>(slots), elements);
                  },
                  &what),
              ErrorCode::kInvalid);
    return what;
  };
  const ChunkedSlots good{.format = DType::kInt8, .chunk_elements = 1000, .chunk_bytes = 1004};
  const auto* const slots = static_cast<const std::byte*>(to.data());
  const auto with = [&](auto change) {
    ChunkedSlots of = good;
    change(of);
    return refused(of, slots);
  };
  EXPECT_THAT(with([](auto& of) { of.format = DType::kBF16; }), HasSubstr("the format bf16"));
  EXPECT_THAT(with([](auto& of) { of.chunk_elements = 0; }), HasSubstr("which do not fit"));
  EXPECT_THAT(with([](auto& of) { of.chunk_bytes = 1000; }), HasSubstr("which do not fit"));
  EXPECT_THAT(with([](auto& of) { of.chunk_bytes = 1006; }), HasSubstr("which do not fit"));
  EXPECT_THAT(with([](auto& of) { of.chunk_elements = 10; }), HasSubstr("not inside one"));
  EXPECT_THAT(refused(good, slots + 1), HasSubstr("which do not fit"));
  EXPECT_THAT(refused(good, slots + 8), HasSubstr("not inside one allocation"));
  EXPECT_THAT(refused(good, slots, to.floats()), HasSubstr("not inside one allocation"));
  EXPECT_THAT(refused(good, slots, from.floats()), HasSubstr("residual of 4000 bytes"));
  EXPECT_THAT(refused(good, from.data()), HasSubstr("overlap"));
  stream_->encode(from.data(), DType::kF32, 1, nullptr, good, to.data(), 1000);
  stream_->synchronize();
}

}  // namespace
}  // namespace phub
