//! The dispatcher of one rank that holds every expert: a copy of rows by expert, and the sum back. No
//! traffic.

use plica_kernels::{Float, Tensor};

use crate::dispatcher::{
    CombineStarted, DispatchBackwardStarted, DispatchStarted, Dispatched, Dispatcher, Handle, Started,
    send_order,
};
use crate::error::DispatchError;
use crate::grid::ExpertGrid;
use crate::routes;
use crate::routing::Routing;
use crate::rows::{flat, gather, sum};

const NAME: &str = "local";

/// Every expert on this rank.
#[derive(Clone, Debug)]
pub struct Local {
    grid: ExpertGrid,
}

impl Local {
    /// A dispatcher for `experts` experts.
    ///
    /// # Errors
    /// When there are none.
    pub fn new(experts: usize) -> Result<Local, DispatchError> {
        Ok(Local { grid: ExpertGrid::new(1, 1, experts)? })
    }
}

impl<T: Float> Dispatcher<T> for Local {
    fn name(&self) -> &'static str {
        NAME
    }

    fn dispatch_begin(
        &self,
        x_td: &Tensor<T>,
        routing: &Routing<T::Acc>,
    ) -> Result<DispatchStarted<T>, DispatchError> {
        let order = send_order(&self.grid, x_td, routing)?;
        let (routes, weight_routes) = routes::local(&order);
        let dispatched = Dispatched {
            x_rd: gather(x_td.device(), &[x_td], &routes.place),
            weights_r: gather(x_td.device(), &[&flat(&routing.weights_tk)], &weight_routes.place),
            counts_l: order.rows_e.clone(),
        };
        let handle = Handle::new(NAME, &order, order.rows_e.clone(), routes);
        Ok(Started::ready((dispatched, handle)))
    }

    fn combine_begin(
        &self,
        y_rd: &Tensor<T>,
        handle: &Handle<T>,
    ) -> Result<CombineStarted<T>, DispatchError> {
        handle.check_rows(NAME, y_rd)?;
        Ok(Started::ready(sum(y_rd.device(), &[y_rd], &handle.routes().token_sums)))
    }

    fn combine_backward_begin(
        &self,
        dy_td: &Tensor<T>,
        handle: &Handle<T>,
    ) -> Result<CombineStarted<T>, DispatchError> {
        handle.check_tokens(NAME, dy_td)?;
        Ok(Started::ready(gather(dy_td.device(), &[dy_td], &handle.routes().place)))
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
        let dx_td = sum(dx_rd.device(), &[dx_rd], &routes.token_sums);
        let dweights = sum(dx_rd.device(), &[dweights_r], &routes.slot_sums);
        Ok(Started::ready((dx_td, dweights.reshape([handle.tokens(), handle.k()]))))
    }
}
