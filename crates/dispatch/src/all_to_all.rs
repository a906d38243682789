//! Rows go to their experts by an uneven all-to-all over EP, then by an all-gather over ETP; they come back
//! by a reduce-scatter over ETP (which adds the partial results) and an all-to-all. A rank's rows for its own
//! experts stay out of the exchange where nobody else needs them. At most k rows a token are sent, whatever
//! the number of ranks; counts are exchanged first. Source: the all-to-all dispatcher of Megatron-Core, with
//! another row order inside an expert.

use std::sync::Arc;

use plica_comm::{Message, Purpose};
use plica_kernels::ops::permute::CsrIndex;
use plica_kernels::{Category, Float, Tensor};

use crate::dispatcher::{
    CombineStarted, DispatchBackwardStarted, DispatchStarted, Dispatched, Dispatcher, ExpertGroups, Handle,
    Started, send_order,
};
use crate::error::DispatchError;
use crate::plan::Counts;
use crate::routes::{self, Gather, Routes};
use crate::routing::Routing;
use crate::rows::{flat, gather, sum};

const NAME: &str = "all_to_all";

/// See the module text.
#[derive(Clone)]
pub struct AllToAll {
    groups: ExpertGroups,
}

impl AllToAll {
    /// A dispatcher over these groups.
    pub fn new(groups: ExpertGroups) -> AllToAll {
        AllToAll { groups }
    }

    /// Starts to bring rows to the experts: `packed` are the rows to send, `own` the rows that `place` also
    /// reads, by the list that `place` picks.
    fn send<U: Message>(
        &self,
        purpose: Purpose,
        packed: Tensor<U>,
        own: Tensor<U>,
        splits: (&[usize], &[usize], &[usize]),
        place: Arc<Gather>,
    ) -> Result<Started<Tensor<U>>, DispatchError> {
        let (send_rows, receive_rows, member_rows) = splits;
        let pending = self.groups.ep.all_to_all_start(purpose, &packed, send_rows, receive_rows)?;
        let (etp, member_rows) = (self.groups.etp.clone(), member_rows.to_vec());
        Ok(Started::new(move || {
            let mut arrived = pending.finish()?;
            drop(packed);
            if !etp.is_single() {
                arrived = etp.all_gather_rows(purpose, &arrived, &member_rows)?;
            }
            if place.is_identity(arrived.rows()) {
                return Ok(arrived.with_category(Category::Activation));
            }
            Ok(gather(own.device(), &[&arrived, &own], &place))
        }))
    }

    /// Starts to bring the experts' rows back and to sum them by a list of the handle.
    fn send_back<U: Message + Float>(
        &self,
        purpose: Purpose,
        y: &Tensor<U>,
        routes: &Routes,
        sums: Arc<CsrIndex>,
    ) -> Result<Started<Tensor<U>>, DispatchError> {
        let mut back = match routes.unplace.is_identity(y.rows()) {
            true => y.clone(),
            false => gather(y.device(), &[y], &routes.unplace),
        };
        if !self.groups.etp.is_single() {
            back = self.groups.etp.reduce_scatter_rows(purpose, &back, &routes.member_rows)?;
        }
        let (send_rows, receive_rows) = (&routes.receive_rows, &routes.send_rows);
        let pending = self.groups.ep.all_to_all_start(purpose, &back, send_rows, receive_rows)?;
        let own = y.clone();
        Ok(Started::new(move || {
            let returned = pending.finish()?;
            drop(back);
            Ok(sum(own.device(), &[&returned, &own], &sums))
        }))
    }
}

impl<T: Float + Message> Dispatcher<T> for AllToAll
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
        let (grid, rank, device) = (self.groups.grid, self.groups.rank(), x_td.device());
        let order = send_order(&grid, x_td, routing)?;
        // While the counts travel, the send buffer is packed: its order is this rank's own affair.
        let rows_e: Vec<i64> = order.rows_e.iter().map(|&rows| rows as i64).collect();
        let own_counts = Tensor::from_slice(device, [1, rows_e.len()], &rows_e, Category::CommBuffer);
        let all_counts = self.groups.etp_ep.all_gather_start(Purpose::Dispatch, &own_counts)?;
        let pack = routes::pack(&grid, rank, &order);
        let slot_weights = flat(&routing.weights_tk);
        let packed_x = gather(device, &[x_td], &pack.tokens);
        let packed_weights = gather(device, &[&slot_weights], &pack.slots);
        let counts = all_counts.finish()?.to_vec().into_iter().map(|rows| rows as usize).collect();
        let counts = Counts::new(grid, counts);

        let (routes, weight_routes) = routes::all_to_all(rank, &order, pack, &counts);
        let handle = Handle::new(NAME, &order, counts.rows_l(grid.ep_of(rank)), routes);
        let routes = handle.routes();
        let splits = (&routes.send_rows[..], &routes.receive_rows[..], &routes.member_rows[..]);
        let x = self.send(Purpose::Dispatch, packed_x, x_td.clone(), splits, routes.place.clone())?;
        let weight_place = Arc::new(weight_routes.place);
        let weights = self.send(Purpose::Dispatch, packed_weights, slot_weights, splits, weight_place)?;
        Ok(Started::new(move || {
            let (x_rd, weights_r) = (x.finish()?, weights.finish()?);
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
        self.send_back(Purpose::Combine, y_rd, routes, routes.token_sums.clone())
    }

    fn combine_backward_begin(
        &self,
        dy_td: &Tensor<T>,
        handle: &Handle<T>,
    ) -> Result<CombineStarted<T>, DispatchError> {
        handle.check_tokens(NAME, dy_td)?;
        let routes = handle.routes();
        let packed = gather(dy_td.device(), &[dy_td], &routes.pack);
        let splits = (&routes.send_rows[..], &routes.receive_rows[..], &routes.member_rows[..]);
        self.send(Purpose::Combine, packed, dy_td.clone(), splits, routes.place.clone())
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
        let dx = self.send_back(Purpose::Dispatch, dx_rd, routes, routes.token_sums.clone())?;
        let dweights = self.send_back(Purpose::Dispatch, dweights_r, routes, routes.slot_sums.clone())?;
        let shape = [handle.tokens(), handle.k()];
        Ok(Started::new(move || Ok((dx.finish()?, dweights.finish()?.reshape(shape)))))
    }
}
