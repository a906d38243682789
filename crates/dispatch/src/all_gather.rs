//! Every rank gathers all token rows of the expert group and picks those of its experts; the way back is one
//! reduce-scatter of partial sums, which adds over experts and over ETP at once. The traffic grows with the
//! number of ranks whatever k is, so it pays for few ranks or a large k. Source: the all-gather dispatcher of
//! Megatron-Core, here for unequal numbers of tokens too.
//!
//! Rows, their order and all copies are those of the other dispatchers bit for bit. Sums are in another
//! order: a token's rows on one rank are added first, in the accumulator, and the ranks' results then;
//! nothing is rounded before the end.

use std::sync::Arc;

use plica_comm::{Message, Purpose};
use plica_kernels::ops::elementwise::cast;
use plica_kernels::{Category, Element, Float, Tensor};

use crate::dispatcher::{
    CombineStarted, DispatchBackwardStarted, DispatchStarted, Dispatched, Dispatcher, ExpertGroups, Handle,
    Started, send_order,
};
use crate::error::DispatchError;
use crate::plan::Counts;
use crate::routes::{self, Routes};
use crate::routing::Routing;
use crate::rows::{flat, gather, sum};

const NAME: &str = "all_gather";

/// See the module text.
#[derive(Clone)]
pub struct AllGather {
    groups: ExpertGroups,
}

impl AllGather {
    /// A dispatcher over these groups.
    pub fn new(groups: ExpertGroups) -> AllGather {
        AllGather { groups }
    }

    /// Starts to sum what the own rows add to every rank's tokens. Rows that are narrower than the
    /// accumulator are widened first: partial sums are not rounded.
    fn sum_start<T>(
        &self,
        purpose: Purpose,
        y: &Tensor<T>,
        routes: &Routes,
    ) -> Result<Started<Tensor<T>>, DispatchError>
    where
        T: Message + Float,
        T::Acc: Message,
    {
        let (group, rows) = (&self.groups.etp_ep, &routes.member_rows);
        if T::DTYPE == T::Acc::DTYPE {
            let partial = sum(y.device(), &[y], &routes.token_sums);
            let sums = group.reduce_scatter_rows_start(purpose, &partial, rows)?;
            return Ok(Started::new(move || Ok(sums.finish()?)));
        }
        let partial = sum(y.device(), &[&cast::<T, T::Acc>(y)], &routes.token_sums);
        let sums = group.reduce_scatter_rows_start(purpose, &partial, rows)?;
        Ok(Started::new(move || Ok(cast::<T::Acc, T>(&sums.finish()?))))
    }
}

impl<T: Float + Message> Dispatcher<T> for AllGather
where
    T::Acc: Message,
{
    fn name(&self) -> &'static str {
        NAME
    }

    fn dispatch_begin(
        &self,
        x_td: &Tensor<T>,
        routing: &Routing<T::Acc>,
    ) -> Result<DispatchStarted<T>, DispatchError> {
        let (grid, device) = (self.groups.grid, x_td.device().clone());
        let ep = grid.ep_of(self.groups.rank());
        let group = &self.groups.etp_ep;
        let order = send_order(&grid, x_td, routing)?;
        let own: Vec<usize> = order.rows_e.iter().copied().chain([order.tokens]).collect();
        let all = group.exchange_counts(Purpose::Dispatch, &device, &own)?;
        let tokens_of: Vec<usize> = all.iter().map(|counts| counts[grid.experts()]).collect();
        let rows_se = all.iter().flat_map(|counts| &counts[..grid.experts()]).copied().collect();
        let counts = Counts::new(grid, rows_se);

        let rows_of: Vec<usize> = (0..grid.ranks()).map(|source| counts.rows_sent(source)).collect();
        let slots_of: Vec<usize> = tokens_of.iter().map(|tokens| tokens * order.k).collect();
        let slots_n: Vec<i32> = order.slots_n.iter().map(|&slot| slot as i32).collect();
        let slots_n = Tensor::from_slice(&device, [slots_n.len()], &slots_n, Category::CommBuffer);
        let slots = group.all_gather_rows_start(Purpose::Dispatch, &slots_n, &rows_of)?;
        let weights = flat(&routing.weights_tk);
        let weights = group.all_gather_rows_start(Purpose::Dispatch, &weights, &slots_of)?;
        let x = group.all_gather_rows_start(Purpose::Dispatch, x_td, &tokens_of)?;
        Ok(Started::new(move || {
            let slots: Vec<u32> = slots.finish()?.to_vec().into_iter().map(|slot| slot as u32).collect();
            let mut rest = &slots[..];
            let slots_of: Vec<&[u32]> = (0..grid.ranks())
                .map(|source| {
                    let all = rest.split_off(..rows_of[source]).expect("slots of every rank");
                    let start = counts.rows_before(source, ep);
                    &all[start..start + counts.rows_to(source, ep)]
                })
                .collect();
            let (routes, weight_routes) = routes::all_gather(ep, &counts, &slots_of, &tokens_of, order.k);
            let counts_l = counts.rows_l(ep);
            let weights_r = gather(&device, &[&weights.finish()?], &weight_routes.place);
            let x_rd = gather(&device, &[&x.finish()?], &routes.place);
            let handle = Handle::new(NAME, &order, counts_l.clone(), routes);
            Ok((Dispatched { x_rd, weights_r, counts_l }, handle))
        }))
    }

    fn combine_begin(
        &self,
        y_rd: &Tensor<T>,
        handle: &Handle<T>,
    ) -> Result<CombineStarted<T>, DispatchError> {
        handle.check_rows(NAME, y_rd)?;
        self.sum_start(Purpose::Combine, y_rd, handle.routes())
    }

    fn combine_backward_begin(
        &self,
        dy_td: &Tensor<T>,
        handle: &Handle<T>,
    ) -> Result<CombineStarted<T>, DispatchError> {
        handle.check_tokens(NAME, dy_td)?;
        let routes = handle.routes();
        let dy = self.groups.etp_ep.all_gather_rows_start(Purpose::Combine, dy_td, &routes.member_rows)?;
        let (device, place) = (dy_td.device().clone(), Arc::clone(&routes.place));
        Ok(Started::new(move || Ok(gather(&device, &[&dy.finish()?], &place))))
    }

    fn dispatch_backward_begin(
        &self,
        dx_rd: &Tensor<T>,
        dweights_r: &Tensor<T::Acc>,
        handle: &Handle<T>,
    ) -> Result<DispatchBackwardStarted<T>, DispatchError> {
        handle.check_rows(NAME, dx_rd)?;
        handle.check_rows(NAME, dweights_r)?;
        let (routes, k) = (handle.routes(), handle.k());
        let slots_of: Vec<usize> = routes.member_rows.iter().map(|tokens| tokens * k).collect();
        let dx = self.sum_start(Purpose::Dispatch, dx_rd, routes)?;
        let slot_sums = sum(dx_rd.device(), &[dweights_r], &routes.slot_sums);
        let dweights =
            self.groups.etp_ep.reduce_scatter_rows_start(Purpose::Dispatch, &slot_sums, &slots_of)?;
        let shape = [handle.tokens(), k];
        Ok(Started::new(move || Ok((dx.finish()?, dweights.finish()?.reshape(shape)))))
    }
}
