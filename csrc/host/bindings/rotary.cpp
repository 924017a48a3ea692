#include "kernels/rotary.h"

#include <optional>

#include "bindings/common.h"

namespace kunlun {
namespace {

// Views [T, H * D] or [T, H, D] as heads; token and head strides are free.
HeadView heads_of(const at::Tensor& x, int64_t tokens, int64_t head_size, const char* op, const char* name) {
  check_rows(x, op, name);
  TORCH_CHECK((x.dim() == 2 || x.dim() == 3) && x.size(0) == tokens, op, ": ", name, " must be [", tokens,
              ", heads * head_size] or [", tokens, ", heads, head_size], not ", x.sizes());
  if (x.dim() == 3) {
    TORCH_CHECK(x.size(2) == head_size, op, ": ", name, " has heads of ", x.size(2), " elements, head_size is ",
                head_size);
    return {x.data_ptr(), x.size(1), x.stride(0), x.stride(1)};
  }
  TORCH_CHECK(x.size(1) % head_size == 0, op, ": ", name, " has rows of ", x.size(1),
              " elements, which is not a multiple of head_size = ", head_size);
  return {x.data_ptr(), x.size(1) / head_size, x.stride(0), head_size};
}

void check_positions(const at::Tensor& positions, int64_t limit, const char* op) {
  TORCH_CHECK(positions.dim() == 1 && positions.scalar_type() == at::kLong && positions.is_contiguous(), op,
              ": positions must be contiguous int64 of shape [tokens], not ", positions.scalar_type(), " ",
              positions.sizes());
  const int64_t* p = positions.data_ptr<int64_t>();
  bool inside = true;
  for (int64_t i = 0; i < positions.size(0); ++i) inside &= p[i] >= 0 && p[i] < limit;
  if (inside) return;
  int64_t i = 0;
  while (p[i] >= 0 && p[i] < limit) ++i;
  TORCH_CHECK(false, op, ": positions[", i, "] = ", p[i], " is outside the cos_sin_cache, which has ", limit,
              " positions");
}

RotaryAngles angles_of(const at::Tensor& positions, const at::Tensor& cache, bool is_neox, int64_t head_size,
                       const at::Tensor& like, const char* op) {
  check_rows(cache, op, "cos_sin_cache");
  TORCH_CHECK(cache.dim() == 2 && cache.size(1) % 2 == 0 && cache.size(1) <= head_size, op,
              ": cos_sin_cache must be [positions, rotary_dim] with an even rotary_dim of at most head_size = ",
              head_size, ", not ", cache.sizes());
  TORCH_CHECK(cache.scalar_type() == at::kFloat || cache.scalar_type() == like.scalar_type(), op, ": cos_sin_cache is ",
              cache.scalar_type(), "; it must be float32 or the query's type, ", like.scalar_type());
  TORCH_CHECK(head_size >= 1 && head_size <= kMaxHeadSize, op, ": head_size must be 1 to ", kMaxHeadSize, ", not ",
              head_size);
  check_positions(positions, cache.size(0), op);
  return {positions.data_ptr<int64_t>(),        cache.data_ptr(), cache.stride(0), cache.size(1),
          dtype_of(cache, op, "cos_sin_cache"), is_neox};
}

void rotary_embedding(const at::Tensor& positions, at::Tensor query, const std::optional<at::Tensor>& key,
                      int64_t head_size, const at::Tensor& cos_sin_cache, bool is_neox) {
  constexpr const char* op = "rotary_embedding";
  RotaryArgs a{};
  a.dtype = dtype_of(query, op, "query");
  a.angles = angles_of(positions, cos_sin_cache, is_neox, head_size, query, op);
  a.tokens = positions.size(0);
  a.head_size = head_size;
  a.query = heads_of(query, a.tokens, head_size, op, "query");
  if (key.has_value()) {
    TORCH_CHECK(key->scalar_type() == query.scalar_type(), op, ": key is ", key->scalar_type(), ", query is ",
                query.scalar_type(), "; they must have one type");
    a.key = heads_of(*key, a.tokens, head_size, op, "key");
  }
  rotary_kernels_for(active_isa()).rotary_embedding(a);
}

HeadNorm head_norm(const std::optional<at::Tensor>& weight, int64_t head_size, const at::Tensor& like,
                   const char* name) {
  if (!weight.has_value()) return {nullptr, DType::kFloat32};
  TORCH_CHECK(weight->dim() == 1 && weight->is_contiguous() && weight->size(0) == head_size, "split_norm_rope: ", name,
              " must be contiguous and of shape [", head_size, "], not ", weight->sizes());
  TORCH_CHECK(weight->scalar_type() == at::kFloat || weight->scalar_type() == like.scalar_type(),
              "split_norm_rope: ", name, " is ", weight->scalar_type(), "; it must be float32 or the type of qkv, ",
              like.scalar_type());
  return {weight->data_ptr(), dtype_of(*weight, "split_norm_rope", name)};
}

HeadView output_heads(const at::Tensor& out, const at::Tensor& qkv, int64_t heads, int64_t head_size,
                      const char* name) {
  TORCH_CHECK(out.scalar_type() == qkv.scalar_type(), "split_norm_rope: ", name, " is ", out.scalar_type(), ", qkv is ",
              qkv.scalar_type(), "; they must have one type");
  const HeadView view = heads_of(out, qkv.size(0), head_size, "split_norm_rope", name);
  TORCH_CHECK(view.num_heads == heads, "split_norm_rope: ", name, " has ", view.num_heads, " heads, not ", heads);
  return view;
}

void check_qkv(const at::Tensor& qkv, const at::Tensor& positions, int64_t heads, int64_t head_size) {
  check_rows(qkv, "split_norm_rope", "qkv");
  TORCH_CHECK(qkv.dim() == 2 && qkv.size(1) == heads * head_size, "split_norm_rope: qkv must be [tokens, ",
              heads * head_size, "] (query, key and value heads), not ", qkv.sizes());
  TORCH_CHECK(positions.dim() == 1 && positions.size(0) == qkv.size(0), "split_norm_rope: qkv has ", qkv.size(0),
              " rows, positions has the shape ", positions.sizes());
}

void split_norm_rope(at::Tensor query, at::Tensor key, at::Tensor value, const at::Tensor& qkv,
                     const at::Tensor& positions, const at::Tensor& cos_sin_cache,
                     const std::optional<at::Tensor>& q_weight, const std::optional<at::Tensor>& k_weight,
                     int64_t num_heads, int64_t num_kv_heads, int64_t head_size, double epsilon, double weight_offset,
                     bool is_neox) {
  check_qkv(qkv, positions, num_heads + 2 * num_kv_heads, head_size);
  SplitNormRopeArgs a{};
  a.dtype = dtype_of(qkv, "split_norm_rope", "qkv");
  a.angles = angles_of(positions, cos_sin_cache, is_neox, head_size, qkv, "split_norm_rope");
  a.query = output_heads(query, qkv, num_heads, head_size, "query");
  a.key = output_heads(key, qkv, num_kv_heads, head_size, "key");
  a.value = output_heads(value, qkv, num_kv_heads, head_size, "value");
  a.qkv = qkv.data_ptr();
  a.qkv_stride = qkv.stride(0);
  a.query_norm = head_norm(q_weight, head_size, qkv, "q_weight");
  a.key_norm = head_norm(k_weight, head_size, qkv, "k_weight");
  a.epsilon = static_cast<float>(epsilon);
  a.weight_offset = static_cast<float>(weight_offset);
  a.tokens = qkv.size(0);
  a.head_size = head_size;
  rotary_kernels_for(active_isa()).split_norm_rope(a);
}

}  // namespace

KUNLUN_HOST_OP(rotary_embedding, rotary_embedding)
KUNLUN_HOST_OP(split_norm_rope, split_norm_rope)

}  // namespace kunlun
