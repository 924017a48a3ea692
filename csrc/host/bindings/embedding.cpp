#include "kernels/embedding.h"

#include "bindings/common.h"

namespace kunlun {
namespace {

TokenIds token_ids(const char* op, const at::Tensor& ids) {
  TORCH_CHECK(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, op, ": ids must be int32 or int64, not ",
              ids.scalar_type());
  TORCH_CHECK(ids.dim() == 1 && ids.is_contiguous(), op, ": ids must be contiguous and of shape [tokens], not ",
              ids.sizes());
  return {ids.const_data_ptr(), ids.numel(), ids.scalar_type() == at::kLong};
}

int64_t id_at(const at::Tensor& ids, int64_t place) {
  return ids.scalar_type() == at::kLong ? ids.const_data_ptr<int64_t>()[place] : ids.const_data_ptr<int32_t>()[place];
}

void embedding(at::Tensor out, const at::Tensor& ids, const at::Tensor& weight) {
  constexpr const char* op = "embedding";
  TORCH_CHECK(weight.dim() == 2 && out.dim() == 2 && out.size(0) == ids.numel() && out.size(1) == weight.size(1), op,
              ": out must be [tokens, width] and weight [vocabulary, width], not ", out.sizes(), " and ",
              weight.sizes(), " for ", ids.numel(), " tokens");
  TORCH_CHECK(out.scalar_type() == weight.scalar_type(), op, ": out is ", out.scalar_type(), ", weight ",
              weight.scalar_type(), "; they must have one type");
  check_rows(out, op, "out");
  check_rows(weight, op, "weight");
  const int64_t element = weight.element_size();
  const EmbeddingArgs a{
      out.data_ptr(),          weight.const_data_ptr(),    token_ids(op, ids), weight.size(1) * element,
      out.stride(0) * element, weight.stride(0) * element, weight.size(0)};
  const int64_t bad = embedding_kernels_for(active_isa()).embedding(a);
  TORCH_CHECK(bad < 0, op, ": ids[", bad, "] is ", id_at(ids, bad), ", but the table has ", a.vocab, " rows");
}

void vocab_parallel_mask(at::Tensor local_ids, at::Tensor outside, const at::Tensor& ids, int64_t org_start,
                         int64_t org_end, int64_t num_org_padding, int64_t added_start, int64_t added_end) {
  constexpr const char* op = "vocab_parallel_mask";
  const TokenIds from = token_ids(op, ids);
  TORCH_CHECK(
      local_ids.scalar_type() == ids.scalar_type() && local_ids.sizes() == ids.sizes() && local_ids.is_contiguous(), op,
      ": local_ids must be contiguous with the type and shape of ids");
  TORCH_CHECK(outside.scalar_type() == at::kBool && outside.sizes() == ids.sizes() && outside.is_contiguous(), op,
              ": outside must be contiguous bool with the shape of ids");
  embedding_kernels_for(active_isa())
      .vocab_parallel_mask(local_ids.data_ptr(), reinterpret_cast<uint8_t*>(outside.data_ptr<bool>()), from,
                           {org_start, org_end, num_org_padding, added_start, added_end});
}

}  // namespace

KUNLUN_HOST_OP(embedding, embedding)
KUNLUN_HOST_OP(vocab_parallel_mask, vocab_parallel_mask)

}  // namespace kunlun
