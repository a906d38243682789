//! Where the ranks share memory nothing is sent: a receiver copies its rows straight out of the peers' token
//! rows, once, and combine adds a token's rows straight out of the peers' expert rows. Peers first show each
//! other their send orders and tensors; a barrier after the last read gives every tensor back to its owner.
//!
//! Under ETP a row's partial results are added first (rounded to the row's type), then a token's rows: the
//! order of the all-to-all dispatcher, so that both give the same bits.

use std::sync::Arc;

use plica_comm::{CommError, Exposed, Group, Message, Purpose};
use plica_kernels::ops::permute::CsrIndex;
use plica_kernels::{Category, Device, Float, Tensor};

use crate::dispatcher::{
    CombineStarted, DispatchBackwardStarted, DispatchStarted, Dispatched, Dispatcher, ExpertGroups, Handle,
    Started, send_order,
};
use crate::error::DispatchError;
use crate::plan::{Counts, SendOrder};
use crate::routes::{self, Gather, Routes, WeightRoutes};
use crate::routing::Routing;
use crate::rows::{flat, gather, sum};

const NAME: &str = "direct";

/// See the module text.
#[derive(Clone)]
pub struct Direct {
    groups: ExpertGroups,
}

impl Direct {
    /// A dispatcher over these groups.
    ///
    /// # Errors
    /// When the ranks do not share memory.
    pub fn new(groups: ExpertGroups) -> Result<Direct, DispatchError> {
        if !groups.etp_ep.is_single() && !groups.etp_ep.shares_memory() {
            return Err(CommError::NotShared { group: groups.etp_ep.name().to_string() }.into());
        }
        Ok(Direct { groups })
    }

    fn group(&self) -> &Group {
        &self.groups.etp_ep
    }

    /// Shows the own send order and reads the peers': the index lists of this rank.
    fn exchange(
        &self,
        device: &Device,
        order: &SendOrder,
    ) -> Result<(Counts, Routes, WeightRoutes), DispatchError> {
        let (grid, rank) = (self.groups.grid, self.groups.rank());
        let experts = grid.experts();
        let rows_e = order.rows_e.iter().map(|&rows| rows as i32);
        let own: Vec<i32> = rows_e.chain(order.slots_n.iter().map(|&slot| slot as i32)).collect();
        let own = Tensor::from_slice(device, [own.len()], &own, Category::CommBuffer);
        let orders = self.group().expose(Purpose::Dispatch, &own)?;
        let counts_of = |source| orders.peer(source).slice_rows(0..experts).to_vec();
        let rows_se = (0..grid.ranks()).flat_map(counts_of).map(|rows| rows as usize).collect();
        let counts = Counts::new(grid, rows_se);
        let ep = grid.ep_of(rank);
        let needed_slots = |source: usize| -> Vec<u32> {
            let start = experts + counts.rows_before(source, ep);
            let slots = orders.peer(source).slice_rows(start..start + counts.rows_to(source, ep));
            slots.to_vec().into_iter().map(|slot| slot as u32).collect()
        };
        let slots_of: Vec<Vec<u32>> = (0..grid.ranks()).map(needed_slots).collect();
        for (source, slots) in slots_of.iter().enumerate() {
            orders.count_pulled(source, (4 * (experts + slots.len())) as u64);
        }
        let slots_of: Vec<&[u32]> = slots_of.iter().map(Vec::as_slice).collect();
        let (routes, weight_routes) = routes::direct(rank, order, &counts, &slots_of);
        Ok((counts, routes, weight_routes))
    }

    /// Starts to copy rows out of the peers' tensors.
    fn pull<U: Message>(
        &self,
        purpose: Purpose,
        x: &Tensor<U>,
        place: Arc<Gather>,
    ) -> Result<impl FnOnce() -> Tensor<U> + Send + 'static, DispatchError> {
        let (device, exposed) = (x.device().clone(), self.group().expose(purpose, x)?);
        Ok(move || {
            let sources: Vec<&Tensor<U>> = exposed.tensors().iter().collect();
            let out = gather(&device, &sources, &place);
            count_pulled(&exposed, &place.rows_from(sources.len()));
            out
        })
    }

    /// Starts to sum rows out of the peers' tensors.
    fn pull_sums<U: Message + Float>(
        &self,
        purpose: Purpose,
        y: &Tensor<U>,
        routes: &Routes,
        sums: Arc<CsrIndex>,
    ) -> Result<impl FnOnce() -> Tensor<U> + Send + 'static, DispatchError> {
        let (device, exposed) = (y.device().clone(), self.group().expose(purpose, y)?);
        let partial_sums = routes.partial_sums.clone();
        let etp = self.groups.grid.etp();
        let rows: Vec<usize> = routes.send_rows.iter().flat_map(|&n| std::iter::repeat_n(n, etp)).collect();
        Ok(move || {
            let sources: Vec<&Tensor<U>> = exposed.tensors().iter().collect();
            let out = match partial_sums {
                None => sum(&device, &sources, &sums),
                Some(partials) => sum(&device, &[&sum(&device, &sources, &partials)], &sums),
            };
            count_pulled(&exposed, &rows);
            out
        })
    }

    /// Waits until no peer reads the own tensors any more.
    fn returned(&self, purpose: Purpose) -> impl FnOnce() -> Result<(), DispatchError> + Send + 'static {
        let group = self.group().clone();
        move || Ok(group.barrier(purpose)?)
    }
}

/// Books the rows that were read from each peer.
fn count_pulled<U: Message>(exposed: &Exposed<U>, rows: &[usize]) {
    for (source, &rows) in rows.iter().enumerate() {
        let row_bytes = exposed.peer(source).row_len() * size_of::<U>();
        exposed.count_pulled(source, (rows * row_bytes) as u64);
    }
}

impl<T: Float + Message> Dispatcher<T> for Direct
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
        let grid = self.groups.grid;
        let order = send_order(&grid, x_td, routing)?;
        let (counts, routes, weight_routes) = self.exchange(x_td.device(), &order)?;
        let handle = Handle::new(NAME, &order, counts.rows_l(grid.ep_of(self.groups.rank())), routes);
        let x = self.pull(Purpose::Dispatch, x_td, handle.routes().place.clone())?;
        let place = Arc::new(weight_routes.place);
        let weights = self.pull(Purpose::Dispatch, &flat(&routing.weights_tk), place)?;
        let returned = self.returned(Purpose::Dispatch);
        Ok(Started::new(move || {
            let (x_rd, weights_r) = (x(), weights());
            returned()?;
            let counts_l = handle.counts_l().to_vec();
            Ok((Dispatched { x_rd, weights_r, counts_l }, handle))
        }))
    }

    fn combine_begin(
        &self,
        y_rd: &Tensor<T>,
        handle: &Handle<T>,
    ) -> Result<CombineStarted<T>, DispatchError> {
        handle.check_rows(NAME, y_rd)?;
        let routes = handle.routes();
        let y = self.pull_sums(Purpose::Combine, y_rd, routes, routes.token_sums.clone())?;
        let returned = self.returned(Purpose::Combine);
        Ok(Started::new(move || {
            let y_td = y();
            returned().map(|()| y_td)
        }))
    }

    fn combine_backward_begin(
        &self,
        dy_td: &Tensor<T>,
        handle: &Handle<T>,
    ) -> Result<CombineStarted<T>, DispatchError> {
        handle.check_tokens(NAME, dy_td)?;
        let dy = self.pull(Purpose::Combine, dy_td, handle.routes().place.clone())?;
        let returned = self.returned(Purpose::Combine);
        Ok(Started::new(move || {
            let dy_rd = dy();
            returned().map(|()| dy_rd)
        }))
    }

    fn dispatch_backward_begin(
        &self,
        dx_rd: &Tensor<T>,
        dweights_r: &Tensor<T::Acc>,
        handle: &Handle<T>,
    ) -> Result<DispatchBackwardStarted<T>, DispatchError> {
        handle.check_rows(NAME, dx_rd)?;
        handle.check_rows(NAME, dweights_r)?;
        let routes = handle.routes();
        let dx = self.pull_sums(Purpose::Dispatch, dx_rd, routes, routes.token_sums.clone())?;
        let dweights = self.pull_sums(Purpose::Dispatch, dweights_r, routes, routes.slot_sums.clone())?;
        let returned = self.returned(Purpose::Dispatch);
        let shape = [handle.tokens(), handle.k()];
        Ok(Started::new(move || {
            let (dx_td, dweights) = (dx(), dweights());
            returned()?;
            Ok((dx_td, dweights.reshape(shape)))
        }))
    }
}
